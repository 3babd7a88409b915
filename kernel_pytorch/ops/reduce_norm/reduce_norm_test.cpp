// What the shape list cannot say: mixed types, odd addresses, orders of dimensions, edges and bad arguments.
#include "kernel_pytorch/ops/reduce_norm/reduce_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::reduce_norm {
namespace {

struct Memory {
  std::vector<char> bytes;
  TensorView view;
  Memory(DType dtype, int64_t elements, unsigned seed, int misaligned_elements = 0)
      : bytes(static_cast<size_t>((elements + misaligned_elements) * size_of(dtype)) + 64) {
    view = contiguous_view(bytes.data() + misaligned_elements * size_of(dtype), dtype, {elements});
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elements; ++i) store_element(view.data, dtype, i, normal(random));
  }
};

float norm_of(const std::vector<TensorView>& tensors, Context& context) {
  float result = -1;
  reduce_norm::norm({tensors, contiguous_view(&result, DType::kFloat32, {})}, context);
  return result;
}

TEST(ReduceNorm, MixedTypesAndOddAddresses) {
  OwnContext context;
  const Memory memories[] = {{DType::kFloat32, 100001, 1, 1},
                             {DType::kBFloat16, 70003, 2, 3},
                             {DType::kFloat16, 33, 3, 1},
                             {DType::kFloat32, 0, 4},
                             {DType::kBFloat16, 1, 5}};
  std::vector<TensorView> tensors;
  double squares = 0;
  for (const Memory& memory : memories) {
    tensors.push_back(memory.view);
    for (int64_t i = 0; i < memory.view.element_count(); ++i) {
      squares += std::pow(load_element(memory.view.data, memory.view.dtype, i), 2);
    }
  }
  EXPECT_NEAR(norm_of(tensors, context), std::sqrt(squares), 1e-6 * std::sqrt(squares));
}

TEST(ReduceNorm, SameBitsForEveryNumberOfThreads) {
  OwnContext context;
  const Memory memory(DType::kFloat32, 1000003, 7);
  const float all = norm_of({memory.view, memory.view}, context);
  context->threads = nullptr;
  EXPECT_EQ(norm_of({memory.view, memory.view}, context), all);
}

TEST(ReduceNorm, Edges) {
  OwnContext context;
  EXPECT_EQ(norm_of({}, context), 0);
  std::vector<float> values(70, 0.0f);
  TensorView view = contiguous_view(values.data(), DType::kFloat32, {70});
  EXPECT_EQ(norm_of({view}, context), 0);
  values[69] = 1e30f;  // its square is no float
  EXPECT_FLOAT_EQ(norm_of({view}, context), 1e30f);
  values[3] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(norm_of({view}, context), std::numeric_limits<float>::infinity());
  values[65] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(norm_of({view}, context)));
}

TEST(ReduceNorm, AnyOrderOfDimensionsButNoGaps) {
  OwnContext context;
  const Memory memory(DType::kFloat32, 60, 3);
  const float flat = norm_of({memory.view}, context);
  TensorView view = contiguous_view(memory.view.data, DType::kFloat32, {3, 4, 5});
  std::swap(view.sizes[0], view.sizes[2]);
  std::swap(view.strides[0], view.strides[2]);
  EXPECT_EQ(norm_of({view}, context), flat);
  const auto message_of = [&](const TensorView& bad) {
    try {
      norm_of({memory.view, bad}, context);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  TensorView gap = contiguous_view(memory.view.data, DType::kFloat32, {3, 4});
  gap.strides[0] = 20;
  EXPECT_NE(message_of(gap).find("tensor 1 has shape [3, 4] and strides [20, 1]"), std::string::npos);
  TensorView expanded = contiguous_view(memory.view.data, DType::kFloat32, {3, 4});
  expanded.strides[0] = 0;
  EXPECT_NE(message_of(expanded).find("make it contiguous"), std::string::npos);
  EXPECT_NE(message_of(contiguous_view(memory.view.data, DType::kInt32, {3})).find("int32"), std::string::npos);
}

TEST(TensorList, ChunksCoverEveryElementOnce) {
  const std::vector<int64_t> sizes = {0, 5, 8, 0, 17, 1};
  const ChunkMap chunks(sizes, 8);
  std::vector<int64_t> seen(sizes.size(), 0);
  for (int64_t i = 0; i < chunks.count(); ++i) {
    EXPECT_EQ(chunks[i].begin, seen[chunks[i].tensor]);
    EXPECT_GT(chunks[i].count, 0);
    seen[chunks[i].tensor] += chunks[i].count;
  }
  EXPECT_EQ(seen, sizes);
}

}  // namespace
}  // namespace kernel_pytorch::reduce_norm
