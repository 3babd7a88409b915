// What the shape list cannot say: exact sums at the extremes of int8, rows with NaN, zeros and tiny numbers, and bad
// arguments.
#include "kernel_pytorch/ops/int8_matmul/int8_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::int8_matmul {
namespace {

// Kernels of this machine; a choice that it does not take is an error of its own.
std::vector<const char*> kernels_here(OwnContext& context) {
  std::vector<const char*> names = {"cpu", "reference"};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vnni") && context->info->cpu.isa >= CpuIsa::kX86V4) names.push_back("cpu_dots");
#elif defined(__aarch64__)
  if (context->info->cpu.isa >= CpuIsa::kNeonDot) names.push_back("cpu_dots");
#endif
  return names;
}

// Sums of bytes in pairs would saturate in 16 bits here.
TEST(Int8Matmul, SumsAreExactAtTheExtremes) {
  OwnContext context;
  for (const int64_t k : {1, 7, 64, 100, 1000}) {
    const int64_t m = 5, n = 9;
    std::vector<int8_t> x(m * k), weight(n * k);
    for (size_t i = 0; i < x.size(); ++i) x[i] = i % 3 == 0 ? 127 : i % 3 == 1 ? -128 : static_cast<int8_t>(i * 37);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = i % 2 == 0 ? -128 : i % 5 == 1 ? 127 : -127;
    std::vector<float> scale_x(m, 1), scale_weight(n, 1), output(m * n);
    for (const char* kernel : kernels_here(context)) {
      context->kernel_override = kernel;
      multiply({.x = contiguous_view(x.data(), DType::kInt8, {m, k}),
                .weight = contiguous_view(weight.data(), DType::kInt8, {n, k}),
                .scale_weight = contiguous_view(scale_weight.data(), DType::kFloat32, {n, 1}),
                .scale_x = contiguous_view(scale_x.data(), DType::kFloat32, {m}),
                .output = contiguous_view(output.data(), DType::kFloat32, {m, n})},
               context);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          int64_t sum = 0;
          for (int64_t p = 0; p < k; ++p) sum += int64_t{x[i * k + p]} * weight[j * k + p];
          ASSERT_EQ(output[i * n + j], static_cast<float>(sum)) << kernel << " k " << k << " " << i << ", " << j;
        }
      }
    }
  }
}

// A row's scale is that of its largest magnitude; one that has no number for it makes no other row wrong.
TEST(Int8Matmul, RowsAreRoundedByThemselves) {
  OwnContext context;
  const int64_t k = 70;
  std::vector<float> x(5 * k, 0);
  for (int64_t i = 0; i < k; ++i) {
    x[i] = static_cast<float>(i - 35);         // -35 to 34
    x[k + i] = i == 3 ? std::nanf("") : 1.0f;  // NaN
    x[2 * k + i] = i == 69 ? INFINITY : 1.0f;  // infinity
    x[4 * k + i] = i == 0 ? 1e-37f : 0.0f;     // too small: zeros, as row 3
  }
  std::vector<int8_t> weight(k, 1);
  std::vector<float> scale(1, 2), output(5);
  for (const char* kernel : kernels_here(context)) {
    context->kernel_override = kernel;
    multiply({.x = contiguous_view(x.data(), DType::kFloat32, {5, k}),
              .weight = contiguous_view(weight.data(), DType::kInt8, {1, k}),
              .scale_weight = contiguous_view(scale.data(), DType::kFloat32, {1, 1}),
              .output = contiguous_view(output.data(), DType::kFloat32, {5, 1})},
             context);
    int sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += static_cast<int>(std::nearbyint(x[i] / (35.0f / 127.0f)));
    EXPECT_FLOAT_EQ(output[0], 2 * (35.0f / 127.0f) * static_cast<float>(sum)) << kernel;
    EXPECT_TRUE(std::isnan(output[1]) && std::isnan(output[2])) << kernel << " " << output[1] << " " << output[2];
    EXPECT_EQ(output[3], 0) << kernel;
    EXPECT_EQ(output[4], 0) << kernel;
  }
}

TEST(Int8Matmul, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> scales(8, 1), output(8);
  std::vector<int8_t> codes(256, 1);
  const Product good{.x = contiguous_view(codes.data(), DType::kInt8, {2, 1, 64}),
                     .weight = contiguous_view(codes.data(), DType::kInt8, {4, 64}),
                     .scale_weight = contiguous_view(scales.data(), DType::kFloat32, {4, 2}),
                     .scale_x = contiguous_view(scales.data(), DType::kFloat32, {2, 1}),
                     .group = 32,
                     .output = contiguous_view(output.data(), DType::kFloat32, {2, 1, 4})};
  multiply(good, context);
  const auto expect = [&](const std::function<void(Product&)>& change, const char* words) {
    Product bad = good;
    change(bad);
    try {
      multiply(bad, context);
      ADD_FAILURE() << "no error with " << words;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  expect([](Product& call) { call.scale_x = {}; }, "scale_x is missing");
  expect([](Product& call) { call.x.dtype = DType::kBFloat16; }, "scale_x is given");
  expect([](Product& call) { call.group = 48; }, "group is 48");
  expect([](Product& call) { call.group = 64; }, "it must be [4, 1]");
  expect([](Product& call) { call.weight.dtype = DType::kFloat32; }, "contiguous int8 matrix");
  expect([](Product& call) { call.x.sizes[2] = 60; }, "their last sizes must be equal");
  expect([](Product& call) { call.output.sizes[2] = 3; }, "output has shape");
  expect([](Product& call) { call.bias = contiguous_view(nullptr, DType::kFloat32, {3}); }, "bias is");
}

}  // namespace
}  // namespace kernel_pytorch::int8_matmul
