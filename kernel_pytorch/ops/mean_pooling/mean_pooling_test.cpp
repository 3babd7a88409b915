// What the shape list cannot say: empty sequences, tokens in none, orders of dimensions, edges and bad arguments.
#include "kernel_pytorch/ops/mean_pooling/mean_pooling.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::mean_pooling {
namespace {

std::vector<float> random_floats(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}
TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
TensorView view_of(std::vector<int64_t>& values) {
  return contiguous_view(values.data(), DType::kInt64, {static_cast<int64_t>(values.size())});
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(MeanPooling, EmptySequencesAndTokensInNone) {
  OwnContext context;
  std::vector<float> x = random_floats(10 * 3), means(4 * 3, -1), gradient(10 * 3, -1);
  std::vector<int64_t> offsets = {1, 4, 4, 5, 8};
  mean_pooling::forward({.x = view_of(x, {10, 3}), .offsets = view_of(offsets), .output = view_of(means, {4, 3})},
                        context);
  for (int64_t j = 0; j < 3; ++j) {
    EXPECT_FLOAT_EQ(means[j], (x[3 + j] + x[6 + j] + x[9 + j]) / 3);
    EXPECT_EQ(means[3 + j], 0);
    EXPECT_EQ(means[6 + j], x[12 + j]);
    EXPECT_FLOAT_EQ(means[9 + j], (x[15 + j] + x[18 + j] + x[21 + j]) / 3);
  }
  mean_pooling::backward(
      {.grad_output = view_of(means, {4, 3}), .offsets = view_of(offsets), .grad_input = view_of(gradient, {10, 3})},
      context);
  const int sequence_of[] = {-1, 0, 0, 0, 2, 3, 3, 3, -1, -1}, lengths[] = {3, 0, 1, 3};
  for (int64_t i = 0; i < 30; ++i) {
    const int sequence = sequence_of[i / 3];
    EXPECT_FLOAT_EQ(gradient[i], sequence < 0 ? 0 : means[sequence * 3 + i % 3] / static_cast<float>(lengths[sequence]))
        << i;
  }
}

TEST(MeanPooling, TheLastChunkIsDividedByItsLength) {
  OwnContext context;
  std::vector<float> x = random_floats(2 * 7 * 2), means(2 * 2 * 2);
  mean_pooling::forward({.x = view_of(x, {2, 7, 2}), .chunk_size = 4, .output = view_of(means, {2, 2, 2})}, context);
  EXPECT_FLOAT_EQ(means[2], (x[8] + x[10] + x[12]) / 3);
  EXPECT_FLOAT_EQ(means[7], (x[14 + 9] + x[14 + 11] + x[14 + 13]) / 3);
}

TEST(MeanPooling, DimensionsBetweenTokensAndColumns) {
  OwnContext context;
  std::vector<float> x = random_floats(2 * 3 * 4 * 5 * 6), means(2 * 12 * 6);
  TensorView heads_first = view_of(x, {2, 12, 5, 6});  // [2, 5, 12, 6] out of [2, 12, 5, 6]
  std::swap(heads_first.sizes[1], heads_first.sizes[2]);
  std::swap(heads_first.strides[1], heads_first.strides[2]);
  mean_pooling::forward({.x = heads_first, .output = view_of(means, {2, 12, 6})}, context);
  for (int64_t row = 0; row < 24; ++row) {
    for (int64_t j = 0; j < 6; ++j) {
      float total = 0;
      for (int64_t token = 0; token < 5; ++token) total += x[row * 30 + token * 6 + j];
      ASSERT_NEAR(means[row * 6 + j], total / 5, 1e-6);
    }
  }
  TensorView scattered = view_of(x, {3, 4, 2, 5, 6});
  scattered.sizes = {2, 5, 3, 2, 6};
  scattered.strides = {30, 6, 240, 60, 1};
  const std::string message = message_of([&] {
    mean_pooling::forward({.x = scattered, .output = view_of(means, {2, 3, 2, 6})}, context);
  });
  EXPECT_NE(message.find("do not merge"), std::string::npos) << message;
}

TEST(MeanPooling, ThreadsDoNotShow) {
  std::vector<float> x = random_floats(3000 * 70), together(70), alone(70);
  OwnContext context;
  mean_pooling::forward({.x = view_of(x, {1, 3000, 70}), .output = view_of(together, {1, 70})}, context);
  context->threads = nullptr;
  mean_pooling::forward({.x = view_of(x, {1, 3000, 70}), .output = view_of(alone, {1, 70})}, context);
  EXPECT_EQ(together, alone);
}

TEST(MeanPooling, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(40), means(8);
  std::vector<int64_t> offsets = {0, 11};
  const auto message = [&](const mean_pooling::Forward& arguments) {
    return message_of([&] { mean_pooling::forward(arguments, context); });
  };
  EXPECT_NE(message({.x = view_of(x, {10, 4}), .offsets = view_of(offsets), .output = view_of(means, {1, 4})})
                .find("offsets 0 and 1 are 0 and 11, x has 10 tokens"),
            std::string::npos);
  EXPECT_NE(message({.x = view_of(x, {10, 4}), .output = view_of(means, {1, 4})}).find("[batch, tokens, ..., columns]"),
            std::string::npos);
  EXPECT_NE(message({.x = view_of(x, {2, 5, 4}), .chunk_size = -1, .output = view_of(means, {2, 4})})
                .find("chunk_size is -1"),
            std::string::npos);
  EXPECT_NE(message({.x = view_of(x, {2, 5, 4}), .output = view_of(means, {1, 4})}).find("with 2 means of 4 elements"),
            std::string::npos);
  EXPECT_NE(message({.x = view_of(x, {2, 5, 4}), .offsets = view_of(means, {2}), .output = view_of(means, {2, 4})})
                .find("offsets are fp32"),
            std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::mean_pooling
