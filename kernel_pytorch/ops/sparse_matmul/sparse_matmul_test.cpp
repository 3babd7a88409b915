// What the shape list cannot say: every pair of places at every position of a word, and bad arguments.
#include "kernel_pytorch/ops/sparse_matmul/sparse_matmul.h"

#include <gtest/gtest.h>

#include <functional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

constexpr uint32_t kPairs[] = {4, 8, 9, 12, 13, 14};  // first | second << 2

// A one-hot x reads single weights: every pair of places comes out where it says.
TEST(SparseMatmul, AOneHotRowReadsEachWeight) {
  const int64_t n = 6, k = 76, blocks = 2;
  std::vector<float> values(n * k / 2), dense(n * k), expected(n * k);
  std::vector<uint32_t> metadata(blocks * n * 2, 0x44444444u);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t group = 0; group < k / 4; ++group) {
      const uint32_t pair = kPairs[(row + group) % 6];
      uint32_t& word = metadata[(group / 16 * n + row) * 2 + group % 16 / 8];
      word = (word & ~(0xfu << group % 8 * 4)) | pair << group % 8 * 4;
      expected[row * k + group * 4 + (pair & 3)] = values[row * k / 2 + group * 2];
      expected[row * k + group * 4 + (pair >> 2)] = values[row * k / 2 + group * 2 + 1];
    }
  }
  OwnContext context;
  const TensorView of_values = contiguous_view(values.data(), DType::kFloat32, {n, k / 2});
  const TensorView of_metadata = contiguous_view(metadata.data(), DType::kInt32, {blocks, n, 2});
  sparse_compress::decompress(
      {.values = of_values, .metadata = of_metadata, .output = contiguous_view(dense.data(), DType::kFloat32, {n, k})},
      context);
  EXPECT_EQ(dense, expected);
  std::vector<float> x(k * k), output(k * n);
  for (int64_t i = 0; i < k; ++i) x[i * k + i] = 1;
  for (const char* kernel : {"cpu", "composed", "reference"}) {
    context->kernel_override = kernel;
    multiply({.x = contiguous_view(x.data(), DType::kFloat32, {k, k}),
              .values = of_values,
              .metadata = of_metadata,
              .output = contiguous_view(output.data(), DType::kFloat32, {k, n})},
             context);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t column = 0; column < k; ++column) {
        ASSERT_EQ(output[column * n + row], expected[row * k + column]) << kernel << " " << row << ", " << column;
      }
    }
  }
}

TEST(SparseMatmul, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(64), values(64), output(64);
  std::vector<int32_t> metadata(16, 0x44444444);
  const Product good{.x = contiguous_view(x.data(), DType::kFloat32, {2, 1, 16}),
                     .values = contiguous_view(values.data(), DType::kFloat32, {4, 8}),
                     .metadata = contiguous_view(metadata.data(), DType::kInt32, {1, 4, 2}),
                     .output = contiguous_view(output.data(), DType::kFloat32, {2, 1, 4})};
  multiply(good, context);
  const auto message_of = [&](const std::function<void(Product&)>& change) {
    Product bad = good;
    change(bad);
    try {
      multiply(bad, context);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto has = [](const std::string& text, const char* word) { return text.find(word) != std::string::npos; };
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.values.sizes[1] = 7; }), "values are"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.metadata.sizes[0] = 2; }), "metadata is"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.metadata.dtype = DType::kInt64; }), "int32"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.values.dtype = DType::kBFloat16; }), "one type"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.x.sizes[2] = 14; }), "multiple of 4"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.output.sizes[2] = 5; }), "output has shape"));
  EXPECT_TRUE(has(message_of([&](Product& bad) { bad.bias = bad.x; }), "bias is"));
}

}  // namespace
}  // namespace kernel_pytorch::sparse_matmul
