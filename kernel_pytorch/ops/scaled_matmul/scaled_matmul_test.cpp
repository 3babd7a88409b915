// What the shape list cannot say: exact products, strides of scales, edges and bad arguments.
#include "kernel_pytorch/ops/scaled_matmul/scaled_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

TensorView floats(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
TensorView codes(std::vector<uint8_t>& values, DType dtype, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), dtype, sizes);
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

// Every pair of finite codes, by k = 1: products of two codes are exact in fp32, whichever the kernel.
TEST(ScaledMatmul, EveryProductOfTwoCodesIsExact) {
  OwnContext context;
  for (DType a_type : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (DType b_type : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
      std::vector<uint8_t> all(256);
      for (int i = 0; i < 256; ++i) all[i] = static_cast<uint8_t>(i);
      std::vector<float> output(256 * 256), one = {1};
      multiply({.a = codes(all, a_type, {256, 1}),
                .b = codes(all, b_type, {256, 1}),
                .scale_a = floats(one, {1}),
                .scale_b = floats(one, {1}),
                .output = floats(output, {256, 256})},
               context);
      const auto value = [](DType dtype, int code) {
        const auto bits = static_cast<uint8_t>(code);
        return dtype == DType::kFloat8E4M3 ? to_float(Float8E4M3{bits}) : to_float(Float8E5M2{bits});
      };
      for (int i = 0; i < 256; ++i) {
        for (int j = 0; j < 256; ++j) {
          const float expected = value(a_type, i) * value(b_type, j), actual = output[i * 256 + j];
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(actual)) << i << " " << j;
          } else {
            ASSERT_EQ(actual, expected) << i << " " << j;
          }
        }
      }
    }
  }
}

// Blocks of k have their own scales, read with any strides: the transpose of what lies in memory.
TEST(ScaledMatmul, ScalesOfBlocksHaveStrides) {
  OwnContext context;
  const int64_t m = 3, n = 2, k = 300, blocks = 3;
  std::vector<uint8_t> a(m * k, 0x38), b(n * k, 0x38);  // ones
  std::vector<float> scale_a(m * blocks), scale_b(blocks), output(m * n);
  for (size_t i = 0; i < scale_a.size(); ++i) scale_a[i] = static_cast<float>(i + 1);
  for (size_t i = 0; i < scale_b.size(); ++i) scale_b[i] = static_cast<float>(10 + i);
  TensorView by_block = floats(scale_a, {m, blocks});
  by_block.strides = {1, m};
  multiply({.a = codes(a, DType::kFloat8E4M3, {m, k}),
            .b = codes(b, DType::kFloat8E4M3, {n, k}),
            .scale_a = by_block,
            .scale_b = floats(scale_b, {1, blocks}),
            .output = floats(output, {m, n})},
           context);
  const float lengths[] = {128, 128, 44};
  for (int64_t i = 0; i < m; ++i) {
    float expected = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      expected += lengths[block] * scale_a[block * m + i] * scale_b[block];
    }
    for (int64_t j = 0; j < n; ++j) EXPECT_EQ(output[i * n + j], expected) << i << " " << j;
  }
}

TEST(ScaledMatmul, AmaxIsRaisedAndPassesNanOver) {
  OwnContext context;
  std::vector<uint8_t> a = {0x38, 0x7f, 0xc0}, b = {0x40};  // 1, NaN, -2 times 2
  std::vector<float> one = {1}, amax = {3}, output(3), factor = {1};
  const auto run = [&] {
    multiply({.a = codes(a, DType::kFloat8E4M3, {3, 1}),
              .b = codes(b, DType::kFloat8E4M3, {1, 1}),
              .scale_a = floats(one, {1}),
              .scale_b = floats(one, {1}),
              .output = floats(output, {3, 1}),
              .amax = floats(amax, {1})},
             context);
  };
  run();
  EXPECT_EQ(amax[0], 4);
  EXPECT_TRUE(std::isnan(output[1]));
  amax[0] = 5;
  run();
  EXPECT_EQ(amax[0], 5);
}

TEST(ScaledMatmul, Float8OutputsSaturate) {
  OwnContext context;
  std::vector<uint8_t> a = {0x7e, 0xfe, 0x38}, b = {0x7e}, output(3);
  std::vector<float> one = {1}, factor = {0.5f}, amax = {0};
  multiply({.a = codes(a, DType::kFloat8E4M3, {3, 1}),
            .b = codes(b, DType::kFloat8E4M3, {1, 1}),
            .scale_a = floats(one, {1}),
            .scale_b = floats(one, {1}),
            .output_scale = floats(factor, {1}),
            .output = codes(output, DType::kFloat8E4M3, {3, 1}),
            .amax = floats(amax, {1})},
           context);
  EXPECT_EQ(output, (std::vector<uint8_t>{0x7e, 0xfe, 0x76}));  // 448, -448, 224
  EXPECT_EQ(amax[0], 448.0f * 448.0f);
}

TEST(ScaledMatmul, ThreadsDoNotShow) {
  const int64_t m = 200, n = 300, k = 500;
  std::mt19937 random(5);
  std::vector<uint8_t> a(m * k), b(n * k);
  for (auto* list : {&a, &b}) {
    for (uint8_t& code : *list) code = static_cast<uint8_t>(random() % 0x70 | (random() % 2 << 7));
  }
  std::vector<float> one = {1}, together(m * n), alone(m * n);
  OwnContext context;
  const auto run = [&](std::vector<float>& output) {
    multiply({.a = codes(a, DType::kFloat8E4M3, {m, k}),
              .b = codes(b, DType::kFloat8E4M3, {n, k}),
              .scale_a = floats(one, {1}),
              .scale_b = floats(one, {1}),
              .output = floats(output, {m, n})},
             context);
  };
  run(together);
  context->threads = nullptr;
  run(alone);
  EXPECT_EQ(together, alone);
}

TEST(ScaledMatmul, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<uint8_t> a(64), b(64);
  std::vector<float> one = {1}, scales(64), output(64);
  Product good{.a = codes(a, DType::kFloat8E4M3, {4, 16}),
               .b = codes(b, DType::kFloat8E4M3, {4, 16}),
               .scale_a = floats(one, {1}),
               .scale_b = floats(one, {1}),
               .output = floats(output, {4, 4})};
  const auto says = [&](const std::function<void(Product&)>& spoil, std::string_view words) {
    Product bad = good;
    spoil(bad);
    const std::string message = message_of([&] { multiply(bad, context); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  says([&](Product& p) { p.a.dtype = DType::kInt8; }, "a is int8; it must be e4m3 or e5m2");
  says([&](Product& p) { p.b.strides = {1, 4}; }, "b has strides [1, 4]");
  says([&](Product& p) { p.b = codes(b, DType::kFloat8E4M3, {8, 8}); }, "their last dimensions, k, must be equal");
  says([&](Product& p) { p.scale_a = floats(scales, {3}); }, "scale_a has shape [3]; for 4 rows and k = 16");
  says([&](Product& p) { p.scale_b = TensorView{}; }, "scale_b is missing");
  says([&](Product& p) { p.output = floats(output, {4, 5}); }, "it must be [4, 4]");
  says([&](Product& p) { p.bias = floats(scales, {5}); }, "one element for each of the 4 rows of b");
  says([&](Product& p) { p.output_scale = floats(one, {1}); }, "output_scale is given");
  says([&](Product& p) { p.output.dtype = DType::kFloat8E5M2; }, "output_scale is missing");
  says([&](Product& p) { p.amax = floats(scales, {2}); }, "amax is fp32[2]");
}

}  // namespace
}  // namespace kernel_pytorch::scaled_matmul
