// What the shape list cannot say: strides, order of sums, edges and bad arguments.
#include "kernel_pytorch/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::embedding {
namespace {

std::vector<float> random_floats(int64_t count, unsigned seed) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<int64_t> random_indices(int64_t count, int64_t rows) {
  std::vector<int64_t> indices(static_cast<size_t>(count));
  std::mt19937 random(9);
  for (int64_t& index : indices) index = static_cast<int64_t>(random() % static_cast<uint64_t>(rows));
  return indices;
}

TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
TensorView view_of(std::vector<int64_t>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kInt64, sizes);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(Embedding, TablesOfAnyStrides) {
  OwnContext context;
  std::vector<float> table = random_floats(20 * 40, 1), output(6 * 13);
  std::vector<int64_t> indices = random_indices(6, 20);
  TensorView sliced = view_of(table, {20, 40});
  sliced.sizes[1] = 13;
  TensorView transposed = view_of(table, {13, 20});
  std::swap(transposed.sizes[0], transposed.sizes[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  for (const TensorView& weight : {sliced, transposed}) {
    embedding::forward({.indices = view_of(indices, {2, 3}), .weight = weight, .output = view_of(output, {2, 3, 13})},
                       context);
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t j = 0; j < 13; ++j) {
        ASSERT_EQ(output[i * 13 + j], table[indices[i] * weight.strides[0] + j * weight.strides[1]]) << i << " " << j;
      }
    }
  }
}

TEST(Embedding, GradientsOfAnyStrides) {
  OwnContext context;
  std::vector<float> gradient = random_floats(4 * 5 * 7, 2), sums(9 * 7, -1);
  std::vector<int64_t> indices = random_indices(20, 9);
  TensorView view = view_of(gradient, {5, 4, 7});  // [4, 5, 7] once its leading dimensions change places
  std::swap(view.sizes[0], view.sizes[1]);
  std::swap(view.strides[0], view.strides[1]);
  embedding::backward({.grad_output = view,
                       .indices = view_of(indices, {4, 5}),
                       .padding_index = indices[3],
                       .grad_weight = view_of(sums, {9, 7})},
                      context);
  std::vector<float> expected(9 * 7, 0.0f);
  for (int64_t i = 0; i < 20; ++i) {
    if (indices[i] == indices[3]) continue;
    for (int64_t j = 0; j < 7; ++j) expected[indices[i] * 7 + j] += gradient[i % 5 * 28 + i / 5 * 7 + j];
  }
  for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(sums[i], expected[i], 1e-5) << i;
}

TEST(Embedding, GradientIsSummedInTheOrderOfPositionsOnEveryNumberOfThreads) {
  std::vector<float> gradient = random_floats(3000 * 65, 3), sums(50 * 65), alone(50 * 65), expected(50 * 65, 0.0f);
  std::vector<int64_t> indices = random_indices(3000, 50);
  OwnContext context;
  const auto run = [&](std::vector<float>& target) {
    embedding::backward({.grad_output = view_of(gradient, {3000, 65}),
                         .indices = view_of(indices, {3000}),
                         .padding_index = -1,
                         .grad_weight = view_of(target, {50, 65})},
                        context);
  };
  run(sums);
  context->threads = nullptr;
  run(alone);
  EXPECT_EQ(sums, alone);
  for (int64_t i = 0; i < 3000; ++i) {
    for (int64_t j = 0; j < 65; ++j) expected[indices[i] * 65 + j] += gradient[i * 65 + j];
  }
  EXPECT_EQ(sums, expected);
}

TEST(Embedding, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> table(8 * 4), rows(3 * 4);
  std::vector<int64_t> indices = {1, 8, 2};
  embedding::Forward forward{
      .indices = view_of(indices, {3}), .weight = view_of(table, {8, 4}), .output = view_of(rows, {3, 4})};
  const auto forward_message = [&] { return message_of([&] { embedding::forward(forward, context); }); };
  EXPECT_NE(forward_message().find("index 8 at position 1, the table has 8 rows"), std::string::npos);
  indices[1] = -1;
  EXPECT_NE(forward_message().find("index -1 at position 1"), std::string::npos);
  indices[1] = 0;
  EXPECT_EQ(forward_message(), "");
  embedding::Backward backward{.grad_output = view_of(rows, {3, 4}),
                               .indices = view_of(indices, {3}),
                               .padding_index = 8,
                               .grad_weight = view_of(table, {8, 4})};
  const auto backward_message = [&] { return message_of([&] { embedding::backward(backward, context); }); };
  EXPECT_NE(backward_message().find("padding_index is 8"), std::string::npos);
  backward.padding_index = 7;
  EXPECT_EQ(backward_message(), "");
  indices[0] = 9;
  EXPECT_NE(backward_message().find("index 9 at position 0"), std::string::npos);
  forward.output = view_of(rows, {4, 3});
  EXPECT_NE(forward_message().find("output has shape [4, 3]"), std::string::npos);
  forward.indices = view_of(rows, {3});
  EXPECT_NE(forward_message().find("indices are fp32"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::embedding
