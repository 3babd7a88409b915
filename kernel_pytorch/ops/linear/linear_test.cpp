// What the shape list cannot say: values by hand, gradients against differences, leading dimensions, bad arguments.
#include "kernel_pytorch/ops/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/mlp/mlp.h"

namespace kernel_pytorch::linear {
namespace {

std::vector<double> drawn(int64_t count, unsigned seed) {
  std::vector<double> values(static_cast<size_t>(count));
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (double& value : values) value = normal(random);
  return values;
}
TensorView view_of(std::vector<double>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat64, sizes);
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(Linear, ByHand) {
  OwnContext context;
  std::vector<double> x = {1, 2, 3, 4}, weight = {1, 0, -1, 1, 2, 1, 0, -1}, bias = {0, 1, 0, 2}, residual(4, 100);
  std::vector<double> output(8), gated(4), kept(8);
  forward({.x = view_of(x, {2, 2}),
           .weight = view_of(weight, {4, 2}),
           .bias = view_of(bias, {4}),
           .activation = Activation::kRelu,
           .output = view_of(output, {2, 4})},
          context);
  EXPECT_EQ(output, (std::vector<double>{1, 2, 4, 0, 3, 2, 10, 0}));
  forward({.x = view_of(x, {2, 2}),
           .weight = view_of(weight, {4, 2}),
           .bias = view_of(bias, {4}),
           .residual = view_of(residual, {2, 2}),
           .activation = Activation::kRelu,
           .gated = true,
           .output = view_of(gated, {2, 2}),
           .preactivation = view_of(kept, {2, 4})},
          context);
  EXPECT_EQ(kept, (std::vector<double>{1, 2, 4, 0, 3, 2, 10, -2}));
  EXPECT_EQ(gated, (std::vector<double>{102, 100, 106, 80}));
}

// Every gradient of an MLP is what a small step of its tensor changes, whatever the activation, gate and order.
TEST(Linear, GradientsOfAnMlpAreDifferences) {
  constexpr int64_t kRows = 6, kIn = 5, kHidden = 4, kOut = 3;
  for (const bool is_gated : {false, true}) {
    for (const Activation activation : {Activation::kIdentity, Activation::kSilu}) {
      for (const bool column_major : {false, true}) {
        OwnContext context;
        const int64_t inner = is_gated ? 2 * kHidden : kHidden;
        std::vector<double> x = drawn(kRows * kIn, 1), weight_in = drawn(inner * kIn, 2), bias_in = drawn(inner, 3),
                            weight_out = drawn(kOut * kHidden, 4), bias_out = drawn(kOut, 5),
                            grad = drawn(kRows * kOut, 6), output(kRows * kOut), hidden(kRows * kHidden),
                            kept(kRows * inner);
        const auto matrix = [&](std::vector<double>& values) {
          TensorView view = view_of(values, {inner, kIn});
          if (column_major) view.strides[0] = 1, view.strides[1] = inner;
          return view;
        };
        const auto run = [&] {
          mlp::forward({.x = view_of(x, {2, 3, kIn}),
                        .weight_in = matrix(weight_in),
                        .bias_in = view_of(bias_in, {inner}),
                        .weight_out = view_of(weight_out, {kOut, kHidden}),
                        .bias_out = view_of(bias_out, {kOut}),
                        .activation = activation,
                        .gated = is_gated,
                        .output = view_of(output, {2, 3, kOut}),
                        .hidden = view_of(hidden, {2, 3, kHidden}),
                        .preactivation = view_of(kept, {2, 3, inner})},
                       context);
          double sum = 0;
          for (size_t i = 0; i < output.size(); ++i) sum += output[i] * grad[i];
          return sum;
        };
        run();
        std::vector<double> of_x = x, of_weight_in = weight_in, of_bias_in = bias_in, of_weight_out = weight_out,
                            of_bias_out = bias_out;
        mlp::backward({.grad_output = view_of(grad, {2, 3, kOut}),
                       .x = view_of(x, {2, 3, kIn}),
                       .weight_in = matrix(weight_in),
                       .bias_in = view_of(bias_in, {inner}),
                       .weight_out = view_of(weight_out, {kOut, kHidden}),
                       .bias_out = view_of(bias_out, {kOut}),
                       .hidden = view_of(hidden, {2, 3, kHidden}),
                       .preactivation = view_of(kept, {2, 3, inner}),
                       .activation = activation,
                       .gated = is_gated,
                       .grad_x = view_of(of_x, {2, 3, kIn}),
                       .grad_weight_in = matrix(of_weight_in),
                       .grad_bias_in = view_of(of_bias_in, {inner}),
                       .grad_weight_out = view_of(of_weight_out, {kOut, kHidden}),
                       .grad_bias_out = view_of(of_bias_out, {kOut})},
                      context);
        const auto expect_differences = [&](std::vector<double>& values, const std::vector<double>& gradient) {
          for (size_t i = 0; i < values.size(); ++i) {
            const double before = values[i], step = 1e-5;
            values[i] = before + step;
            const double up = run();
            values[i] = before - step;
            EXPECT_NEAR((up - run()) / (2 * step), gradient[i], 1e-6) << i;
            values[i] = before;
          }
        };
        expect_differences(x, of_x);
        expect_differences(weight_in, of_weight_in);
        expect_differences(bias_in, of_bias_in);
        expect_differences(weight_out, of_weight_out);
        expect_differences(bias_out, of_bias_out);
      }
    }
  }
}

TEST(Linear, LeadingDimensionsMergeOrAreRefused) {
  OwnContext context;
  std::vector<double> x = drawn(24, 1), weight = {1, 1, 1}, output(8);
  TensorView rows = view_of(x, {2, 4, 3});
  forward({.x = rows, .weight = view_of(weight, {1, 3}), .output = view_of(output, {2, 4, 1})}, context);
  for (size_t i = 0; i < output.size(); ++i) {
    EXPECT_DOUBLE_EQ(output[i], x[3 * i] + x[3 * i + 1] + x[3 * i + 2]);
  }
  std::swap(rows.strides[0], rows.strides[1]);
  std::swap(rows.sizes[0], rows.sizes[1]);
  const std::string message = message_of([&] {
    forward({.x = rows, .weight = view_of(weight, {1, 3}), .output = view_of(output, {4, 2, 1})}, context);
  });
  EXPECT_NE(message.find("linear: x is"), std::string::npos) << message;
  EXPECT_NE(message.find("make it contiguous"), std::string::npos) << message;
}

TEST(Linear, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<double> values(100);
  const auto message = [&](std::initializer_list<int64_t> x, std::initializer_list<int64_t> weight, bool gated,
                           std::initializer_list<int64_t> output) {
    return message_of([&] {
      forward({.x = view_of(values, x),
               .weight = view_of(values, weight),
               .gated = gated,
               .output = view_of(values, output)},
              context);
    });
  };
  EXPECT_EQ(message({2, 3}, {4, 5}, false, {2, 4}),
            "linear: x has shape [2, 3], weight has [4, 5]; their last sizes must be equal");
  EXPECT_EQ(message({2, 3}, {5, 3}, true, {2, 2}), "linear: weight has shape [5, 3]; a gated layer's rows are pairs");
  EXPECT_EQ(message({2, 3}, {4, 3}, false, {1, 2, 4}), "linear: output has shape [1, 2, 4]; it must be [2, 4]");
  EXPECT_EQ(message_of([&] {
              mlp::forward({.x = view_of(values, {2, 3}),
                            .weight_in = view_of(values, {4, 3}),
                            .weight_out = view_of(values, {2, 5}),
                            .output = view_of(values, {2, 2})},
                           context);
            }),
            "mlp: weight_out has shape [2, 5]; its last size must be the hidden size 4");
}

}  // namespace
}  // namespace kernel_pytorch::linear
