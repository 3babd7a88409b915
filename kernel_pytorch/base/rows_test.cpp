#include "kernel_pytorch/base/rows.h"

#include <gtest/gtest.h>

namespace kernel_pytorch {
namespace {

alignas(64) char memory[128];

TensorView matrix(int offset_bytes, int64_t rows, int64_t row_stride) {
  TensorView view = contiguous_view(memory + offset_bytes, DType::kBFloat16, {rows, 8});
  view.strides[0] = row_stride;
  return view;
}

TEST(Rows, AlignmentIsOfTheAddressAndOfEveryRow) {
  EXPECT_TRUE(has_aligned_rows(matrix(0, 3, 8)));
  EXPECT_FALSE(has_aligned_rows(matrix(2, 3, 8)));
  EXPECT_FALSE(has_aligned_rows(matrix(0, 3, 12)));
  EXPECT_TRUE(has_aligned_rows(matrix(0, 3, 12), 8));
  EXPECT_TRUE(has_aligned_rows(matrix(0, 1, 12))) << "a single row has no step";
  EXPECT_TRUE(has_aligned_rows(TensorView{})) << "an absent tensor's are";
}

TEST(Rows, AnotherDimensionMayBeTheDenseOne) {
  TensorView columns = contiguous_view(memory, DType::kBFloat16, {3, 16});
  columns.strides = {1, 8};
  EXPECT_FALSE(has_aligned_rows(columns));
  EXPECT_TRUE(has_aligned_rows(columns, kVectorBytes, 0));
  columns.strides = {1, 9};
  EXPECT_FALSE(has_aligned_rows(columns, kVectorBytes, 0));
}

}  // namespace
}  // namespace kernel_pytorch
