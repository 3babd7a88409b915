// What the shape list cannot say: values by hand, a residual that is the output, large strides, edges, bad arguments.
#include "kernel_pytorch/ops/matmul/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::matmul {
namespace {

std::vector<float> random_floats(int64_t count, unsigned seed = 3) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}
TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(Matmul, ByHand) {
  OwnContext context;
  std::vector<float> a = {1, 2, 3, 4, 5, 6}, b = {1, 0, 2, 1, 0, 3}, c(4, -1), sums(2, -1), bias = {10, 20};
  multiply({.a = view_of(a, {2, 3}),
            .b = view_of(b, {3, 2}),
            .alpha = 2,
            .bias = view_of(bias, {2}),
            .output = view_of(c, {2, 2}),
            .row_sums = view_of(sums, {2})},
           context);
  EXPECT_EQ(c, (std::vector<float>{20, 42, 38, 66}));
  EXPECT_EQ(sums, (std::vector<float>{6, 15}));
}

TEST(Matmul, TheResidualMayBeTheOutput) {
  OwnContext context;
  for (const auto& [m, n, k] : {std::tuple{3, 5, 7}, std::tuple{70, 130, 1100}, std::tuple{1, 70, 2050}}) {
    std::vector<float> a = random_floats(m * k), b = random_floats(k * n, 4), c = random_floats(m * n, 5), before = c,
                       plain(static_cast<size_t>(m * n));
    multiply({.a = view_of(a, {m, k}), .b = view_of(b, {k, n}), .output = view_of(plain, {m, n})}, context);
    multiply({.a = view_of(a, {m, k}),
              .b = view_of(b, {k, n}),
              .residual = view_of(c, {m, n}),
              .beta = -0.5,
              .output = view_of(c, {m, n})},
             context);
    for (size_t i = 0; i < c.size(); ++i) ASSERT_NEAR(c[i], plain[i] - 0.5f * before[i], 1e-3) << i;
  }
}

// A beta of 0 reads no residual, an alpha of 0 still meets infinities, as 0 * infinity is NaN.
TEST(Matmul, SpecialNumbers) {
  OwnContext context;
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> a = {1, 2, 0, 1}, b = {infinity, 1, 1, nan}, c(4), bad(4, nan);
  multiply({.a = view_of(a, {2, 2}),
            .b = view_of(b, {2, 2}),
            .residual = view_of(bad, {2, 2}),
            .beta = 0,
            .output = view_of(c, {2, 2})},
           context);
  EXPECT_EQ(c[0], infinity);
  EXPECT_TRUE(std::isnan(c[1]) && std::isnan(c[2]) && std::isnan(c[3]));
}

// Rows of A 2^31 and more elements behind each other: only strides, no memory between them is touched.
TEST(Matmul, StridesBeyondInt32) {
  OwnContext context;
  std::vector<float> a = random_floats(8), b = random_floats(8 * 4, 9), c(4), expected(4);
  const TensorView dense = view_of(a, {1, 8});
  multiply({.a = dense, .b = view_of(b, {8, 4}), .output = view_of(expected, {1, 4})}, context);
  TensorView far = dense;
  far.strides[0] = int64_t{1} << 33;
  multiply({.a = far, .b = view_of(b, {8, 4}), .output = view_of(c, {1, 4})}, context);
  EXPECT_EQ(c, expected);
}

TEST(Matmul, ThreadsDoNotShow) {
  for (const auto& [m, n, k] : {std::tuple{300, 500, 700}, std::tuple{3, 2000, 900}, std::tuple{1, 3, 9000}}) {
    std::vector<float> a = random_floats(m * k), b = random_floats(k * n, 4), sums(static_cast<size_t>(m)),
                       together(static_cast<size_t>(m * n)), alone = together, alone_sums = sums;
    OwnContext context;
    multiply({.a = view_of(a, {m, k}),
              .b = view_of(b, {k, n}),
              .output = view_of(together, {m, n}),
              .row_sums = view_of(sums, {m})},
             context);
    context->threads = nullptr;
    multiply({.a = view_of(a, {m, k}),
              .b = view_of(b, {k, n}),
              .output = view_of(alone, {m, n}),
              .row_sums = view_of(alone_sums, {m})},
             context);
    EXPECT_EQ(together, alone);
    EXPECT_EQ(sums, alone_sums);
  }
}

TEST(Matmul, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> values(400);
  const auto view = [&](std::initializer_list<int64_t> sizes) { return view_of(values, sizes); };
  const auto expect = [&](const Product& arguments, std::string_view text) {
    const std::string message = message_of([&] { multiply(arguments, context); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect({.a = view({2, 3}), .b = view({4, 2}), .output = view({2, 2})}, "last size and b's last but one");
  expect({.a = view({2, 3}), .b = view({3, 2}), .output = view({2, 3})}, "output has shape [1, 2, 3]; it must be");
  expect({.a = view({2, 3}), .b = view({1, 3, 2}), .output = view({2, 2})}, "a has shape [2, 3], b has [1, 3, 2]");
  expect({.a = view({2, 2, 3}), .b = view({3, 3, 2}), .output = view({2, 2, 2})}, "its leading sizes must be a's, [2]");
  expect({.a = view({2, 3}), .b = view({3, 2}), .bias = view({3}), .output = view({2, 2})}, "2 columns of b");
  expect({.a = view({2, 3}), .b = view({3, 3}), .form = Form::kGated, .output = view({2, 1})}, "takes pairs");
  expect({.a = view({2, 3}), .b = view({3, 2}), .saved = view({2, 2}), .output = view({2, 2})}, "saved is given");
  expect({.a = view({2, 3}), .b = view({3, 2}), .form = Form::kGradient, .output = view({2, 2})}, "saved is missing");
  expect({.a = view({2, 3}), .b = view({3, 2}), .output = view({2, 2}), .row_sums = view({3})}, "2 rows of a");
  expect({.a = view({2, 3}), .b = view({3, 2}), .precision = Precision::kTf32, .output = view({2, 2})}, "a GPU's");
  TensorView scattered = view({2, 3});
  scattered.strides = {6, 2};
  expect({.a = scattered, .b = view({3, 2}), .output = view({2, 2})}, "one must be 1");
  TensorView half = view({3, 2});
  half.dtype = DType::kBFloat16;
  expect({.a = view({2, 3}), .b = half, .output = view({2, 2})}, "a is fp32, b is bf16");
  TensorView expanded = view({2, 2});
  expanded.strides[0] = 0;
  expect({.a = view({2, 3}), .b = view({3, 2}), .output = expanded}, "cannot be expanded");
}

}  // namespace
}  // namespace kernel_pytorch::matmul
