// What the shape list cannot say: every code exactly, biases, leading dimensions and bad arguments.
#include "kernel_pytorch/ops/quantized_matmul/quantized_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

// A one-hot x picks single weights; each comes out as T has it, whatever the number of rows in a call.
template <class T>
void expect_weights(Product call, const std::vector<float>& weight, OwnContext& context, int64_t most_rows = 16) {
  const DType dtype = sizeof(T) == 4 ? DType::kFloat32 : DType::kBFloat16;
  const int64_t n = call.codes.sizes[0], k = static_cast<int64_t>(weight.size()) / n;
  int64_t m = 1;
  for (int64_t first = 0; first < k; first += m, m = m % (most_rows - 1) + 2) {
    std::vector<T> x(m * k), output(m * n);
    for (int64_t i = 0; i < m && first + i < k; ++i) x[i * k + first + i] = from_float<T>(1);
    call.x = contiguous_view(x.data(), dtype, {m, k});
    call.output = contiguous_view(output.data(), dtype, {m, n});
    multiply(call, context);
    for (int64_t i = 0; i < m && first + i < k; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(to_float(output[i * n + j]), to_float(from_float<T>(weight[j * k + first + i])))
            << context->kernel_override << " format " << static_cast<int>(call.format) << " weight " << j << ", "
            << first + i;
      }
    }
  }
}

// Every code at every place of a step comes out exactly.
TEST(QuantizedMatmul, AOneHotRowReadsEachWeight) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kMxfp8, Format::kInt4, Format::kInt8,
                              Format::kInt2, Format::kInt3, Format::kInt5, Format::kInt6}) {
    const bool is_integer = group_format::is_integer(format), is_nvfp4 = format == Format::kNvfp4;
    const int64_t k = 203, n = 9, group = is_nvfp4 ? 16 : 32, groups = (k + group - 1) / group;
    const int64_t bytes = group_format::code_bytes(format, k);
    std::vector<uint8_t> codes(n * bytes), scale_bytes(n * groups), zeros(n * groups);
    for (size_t i = 0; i < codes.size(); ++i)
      codes[i] = static_cast<uint8_t>(i * 37 + 11) & (group_format::is_bit_stream(format) ? 0xff : 0x77);
    for (size_t i = 0; i < zeros.size(); ++i) {
      scale_bytes[i] = static_cast<uint8_t>(is_nvfp4 ? 0x30 + i % 16 : 120 + i % 9);
      zeros[i] = static_cast<uint8_t>(i % 11);
    }
    std::vector<float> scales(n * groups);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.25f * static_cast<float>(i + 1);
    Product call{.codes = contiguous_view(codes.data(), DType::kInt8, {n, bytes}),
                 .scales = is_integer ? contiguous_view(scales.data(), DType::kFloat32, {n, groups})
                                      : contiguous_view(scale_bytes.data(),
                                                        is_nvfp4 ? DType::kFloat8E4M3 : DType::kInt8, {n, groups}),
                 .format = format,
                 .group = group};
    if (is_integer) call.zeros = contiguous_view(zeros.data(), DType::kInt8, {n, groups});
    std::vector<float> weight(n * k);
    OwnContext context;
    group_quantize::dequantize({.codes = call.codes,
                                .scales = call.scales,
                                .zeros = call.zeros,
                                .format = format,
                                .group = group,
                                .columns = k,
                                .output = contiguous_view(weight.data(), DType::kFloat32, {n, k})},
                               context);
    for (const char* kernel : {"cpu_thin", "composed", "reference"}) {
      context->kernel_override = kernel;
      expect_weights<float>(call, weight, context);
    }
#if defined(__x86_64__)
    if (context->info->cpu.isa < CpuIsa::kX86V4 || format == Format::kMxfp8 || group_format::is_bit_stream(format))
      continue;
    std::vector<BFloat16> short_scales;
    for (const float scale : scales) short_scales.push_back(from_float<BFloat16>(scale));
    if (is_integer) call.scales = contiguous_view(short_scales.data(), DType::kBFloat16, {n, groups});
    if (context->info->cpu.isa >= CpuIsa::kX86V4Bf16) {
      context->kernel_override = "cpu_dots";
      expect_weights<BFloat16>(call, weight, context);
    }
    if (__builtin_cpu_supports("avx512vnni")) {
      context->kernel_override = "cpu_integers";
      expect_weights<BFloat16>(call, weight, context, 4);
    }
#endif
  }
}

// Infinite and NaN values of x, which no integer stands for, and values of very different sizes.
TEST(QuantizedMatmul, FewRowsOfAnyValues) {
  const int64_t m = 4, n = 3, k = 300, groups = 10;
  std::vector<BFloat16> x(m * k), output(m * n), scales(n * groups);
  std::vector<uint8_t> codes(n * k, 130);  // each weight is 2 times a scale of 1
  for (auto& scale : scales) scale = from_float<BFloat16>(1);
  for (int64_t i = 0; i < k; ++i) {
    x[i] = from_float<BFloat16>(i == 7 ? INFINITY : 1);
    x[k + i] = from_float<BFloat16>(i == 290 ? NAN : 1);
    x[2 * k + i] = from_float<BFloat16>(i == 0 ? 0x1p-120f : 0);
    x[3 * k + i] = from_float<BFloat16>(i < 128 ? 0x1p40f : i < 256 ? -0x1p40f : 1);
  }
  const auto expect = [&](const Product& call) {
    OwnContext context;
    multiply(call, context);
    for (int64_t i = 0; i < call.x.sizes[0] * n; ++i) {
      const float value = to_float(output[i]);
      const int64_t row = (call.x.as<BFloat16>() - x.data()) / k + i / n;
      if (row == 0) EXPECT_EQ(value, INFINITY);
      if (row == 1) EXPECT_TRUE(std::isnan(value));
      if (row == 2) EXPECT_EQ(value, 0x1p-119f);
      if (row == 3) EXPECT_EQ(value, 88);
    }
  };
  Product call{.codes = contiguous_view(codes.data(), DType::kInt8, {n, k}),
               .scales = contiguous_view(scales.data(), DType::kBFloat16, {n, groups}),
               .format = Format::kInt8,
               .group = 32};
  for (const int64_t rows : {1, 4}) {
    for (int64_t first = 0; first + rows <= m; ++first) {
      call.x = contiguous_view(x.data() + first * k, DType::kBFloat16, {rows, k});
      call.output = contiguous_view(output.data(), DType::kBFloat16, {rows, n});
      expect(call);
    }
  }
}

TEST(QuantizedMatmul, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(128), output(8);
  std::vector<int8_t> codes(64), scales(8);
  const Product good{.x = contiguous_view(x.data(), DType::kFloat32, {2, 1, 32}),
                     .codes = contiguous_view(codes.data(), DType::kInt8, {4, 16}),
                     .scales = contiguous_view(scales.data(), DType::kInt8, {4, 1}),
                     .format = Format::kMxfp4,
                     .group = 32,
                     .output = contiguous_view(output.data(), DType::kFloat32, {2, 1, 4})};
  multiply(good, context);
  const auto message_of = [&](const std::function<void(Product&)>& change) {
    Product bad = good;
    change(bad);
    try {
      multiply(bad, context);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  const auto expect = [&](const std::function<void(Product&)>& change, const char* words) {
    EXPECT_NE(message_of(change).find(words), std::string::npos) << message_of(change);
  };
  expect([](Product& call) { call.x.sizes[2] = 30; }, "codes have shape [4, 16]");
  expect([](Product& call) { call.output.sizes[1] = 2; }, "output has shape");
  expect([](Product& call) { call.scales = {}; }, "scales is missing");
  expect([](Product& call) { call.codes = {}; }, "codes are");
  expect([](Product& call) { call.bias = contiguous_view(nullptr, DType::kFloat32, {3}); }, "bias is");
  expect([](Product& call) { call.tensor_scale = contiguous_view(nullptr, DType::kFloat32, {1}); }, "is for nvfp4");
}

}  // namespace
}  // namespace kernel_pytorch::quantized_matmul
