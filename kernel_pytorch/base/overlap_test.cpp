// Overlap of views against a count of the bytes that their elements have.
#include "kernel_pytorch/base/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace kernel_pytorch {
namespace {

TensorView strided(int64_t byte, DType dtype, std::initializer_list<int64_t> sizes,
                   std::initializer_list<int64_t> strides) {
  TensorView view{
      .data = reinterpret_cast<void*>(byte), .dtype = dtype, .device = {}, .rank = static_cast<int8_t>(sizes.size())};
  std::copy(sizes.begin(), sizes.end(), view.sizes.begin());
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

// How often each byte is part of an element.
std::map<int64_t, int> bytes_of(const TensorView& view) {
  std::map<int64_t, int> bytes;
  for (int64_t index = 0; index < view.element_count(); ++index) {
    int64_t rest = index, at = reinterpret_cast<int64_t>(view.data);
    for (int i = view.rank - 1; i >= 0; --i) {
      at += rest % view.sizes[i] * view.strides[i] * size_of(view.dtype);
      rest /= view.sizes[i];
    }
    for (int byte = 0; byte < size_of(view.dtype); ++byte) ++bytes[at + byte];
  }
  return bytes;
}

TEST(Overlap, OfViewsThatModelsHave) {
  const auto fp32 = DType::kFloat32;
  EXPECT_FALSE(overlaps_itself(strided(4096, fp32, {4, 8}, {8, 1})));
  EXPECT_FALSE(overlaps_itself(strided(4096, fp32, {8, 4}, {1, 8})));
  EXPECT_FALSE(overlaps_itself(strided(4096, fp32, {0, 8}, {0, 1})));
  EXPECT_FALSE(overlaps_itself(strided(4096, fp32, {1, 8}, {0, 1})));
  EXPECT_TRUE(overlaps_itself(strided(4096, fp32, {4, 8}, {0, 1})));   // expanded
  EXPECT_TRUE(overlaps_itself(strided(4096, fp32, {4, 8}, {4, 1})));   // windows
  EXPECT_FALSE(overlaps_itself(strided(4096, fp32, {2, 3}, {3, 2})));  // interleaved
  // query and key of packed [batch 2, sequence 1024, 3, heads 8, head_dim 64]
  const int64_t token = 3 * 512;
  const TensorView query = strided(4096, fp32, {2, 1024, 8, 64}, {1024 * token, token, 64, 1});
  const TensorView key = strided(4096 + 512 * 4, fp32, {2, 1024, 8, 64}, {1024 * token, token, 64, 1});
  EXPECT_FALSE(overlaps_itself(query));
  EXPECT_FALSE(overlap(query, key));
  EXPECT_TRUE(overlap(query, query));
  EXPECT_TRUE(overlap(query, strided(4096 + 511 * 4, fp32, {2, 1024, 8, 64}, {1024 * token, token, 64, 1})));
  EXPECT_TRUE(overlap(query, strided(4096 + 3, DType::kInt8, {1}, {1})));
  EXPECT_FALSE(overlap(query, TensorView{}));
  EXPECT_FALSE(overlap(query, strided(4096, fp32, {0}, {1})));
}

TEST(Overlap, OfRandomViews) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto view = [&] {
    const DType types[] = {DType::kInt8, DType::kBFloat16, DType::kFloat32, DType::kInt64};
    TensorView made{.data = reinterpret_cast<void*>(1024 + draw(0, 40)),
                    .dtype = types[draw(0, 3)],
                    .device = {},
                    .rank = static_cast<int8_t>(draw(0, 4))};
    for (int i = 0; i < made.rank; ++i) made.sizes[i] = draw(draw(0, 9) == 0 ? 0 : 1, 4), made.strides[i] = draw(0, 12);
    return made;
  };
  int overlapping = 0, apart = 0, folded = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = view(), b = view();
    const auto of_a = bytes_of(a), of_b = bytes_of(b);
    const bool shares =
        std::any_of(of_a.begin(), of_a.end(), [&](const auto& byte) { return of_b.contains(byte.first); });
    const bool folds = std::any_of(of_a.begin(), of_a.end(), [](const auto& byte) { return byte.second > 1; });
    ASSERT_EQ(overlap(a, b), shares) << a << " at " << a.data << ", " << b << " at " << b.data;
    ASSERT_EQ(overlaps_itself(a), folds) << a;
    ++(shares ? overlapping : apart);
    folded += folds;
  }
  EXPECT_GT(overlapping, 2000);
  EXPECT_GT(apart, 2000);
  EXPECT_GT(folded, 2000);
}

}  // namespace
}  // namespace kernel_pytorch
