// The loss by chunks against the loss of whole logits, and the size of chunks.
#include "kernel_pytorch/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::linear_cross_entropy {
namespace {

std::vector<float> normal_floats(int64_t count, unsigned seed) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}

TEST(LinearCrossEntropy, ChunksAreWholeTilesOfEqualSize) {
  EXPECT_EQ(rows_per_chunk(8192, 128256, DType::kBFloat16), 1024);
  EXPECT_EQ(rows_per_chunk(100, 1000, DType::kFloat32), 100);
  EXPECT_EQ(rows_per_chunk(8192, 128256, DType::kFloat32), 512);
  EXPECT_EQ(rows_per_chunk(1300, 1, DType::kFloat32, 1024 * 4), 768);
  EXPECT_EQ(rows_per_chunk(10, 1000, DType::kFloat32, 4000 * 4), 4);
  EXPECT_EQ(rows_per_chunk(10, 1000, DType::kFloat32, 1), 1);
}

TEST(LinearCrossEntropy, ChunksDoNotShow) {
  constexpr int64_t kRows = 23, kSize = 12, kClasses = 37;
  std::vector<float> hidden = normal_floats(kRows * kSize, 1), weight = normal_floats(kClasses * kSize, 2);
  std::vector<int64_t> target(kRows);
  for (int64_t i = 0; i < kRows; ++i) target[static_cast<size_t>(i)] = i % 5 == 4 ? -100 : i * 7 % kClasses;
  struct Result {
    std::vector<float> loss = std::vector<float>(1), hidden = std::vector<float>(kRows * kSize),
                       weight = std::vector<float>(kClasses * kSize);
  };
  const auto run = [&](int64_t chunk_bytes) {
    Result result;
    OwnContext context;
    const auto view = [](std::vector<float>& values, std::initializer_list<int64_t> sizes) {
      return contiguous_view(values.data(), DType::kFloat32, sizes);
    };
    forward({.hidden = view(hidden, {kRows, kSize}),
             .weight = view(weight, {kClasses, kSize}),
             .target = contiguous_view(target.data(), DType::kInt64, {kRows}),
             .options = {.label_smoothing = 0.1, .z_loss = 0.01},
             .chunk_bytes = chunk_bytes,
             .loss = view(result.loss, {1}),
             .grad_hidden = view(result.hidden, {kRows, kSize}),
             .grad_weight = view(result.weight, {kClasses, kSize})},
            context);
    return result;
  };
  const Result whole = run(kChunkBytes);
  EXPECT_GT(whole.loss[0], 1);
  for (int64_t rows : {1, 4, 11}) {
    const Result parts = run(rows * kClasses * 4);
    EXPECT_NEAR(parts.loss[0], whole.loss[0], 1e-5);
    for (size_t i = 0; i < parts.hidden.size(); ++i) ASSERT_NEAR(parts.hidden[i], whole.hidden[i], 1e-6) << i;
    for (size_t i = 0; i < parts.weight.size(); ++i) ASSERT_NEAR(parts.weight[i], whole.weight[i], 1e-6) << i;
  }
  // A step of the weight changes the loss as its gradient says.
  const float before = weight[5];
  weight[5] = before + 0.01f;
  const float up = run(kChunkBytes).loss[0];
  weight[5] = before - 0.01f;
  EXPECT_NEAR((up - run(kChunkBytes).loss[0]) / 0.02f, whole.weight[5], 2e-4);
}

TEST(LinearCrossEntropy, BadArgumentsAreNamed) {
  std::vector<float> values(100);
  std::vector<int64_t> target(3);
  OwnContext context;
  const auto message = [&](int64_t rows, int64_t size) -> std::string {
    try {
      forward({.hidden = contiguous_view(values.data(), DType::kFloat32, {rows, 4}),
               .weight = contiguous_view(values.data(), DType::kFloat32, {5, size}),
               .target = contiguous_view(target.data(), DType::kInt64, {3}),
               .loss = contiguous_view(values.data(), DType::kFloat32, {1})},
              context);
    } catch (const Error& error) {
      return error.message();
    }
    return "";
  };
  EXPECT_NE(message(3, 6).find("[rows, size] and [classes, size]"), std::string::npos);
  EXPECT_NE(message(2, 4).find("each of the 2 rows"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::linear_cross_entropy
