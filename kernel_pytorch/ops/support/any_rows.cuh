// A row of any strides as floats, one element per access: for the kernels that take what the vector kernels refuse.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/support/any_rows_cuda.h"

namespace kernel_pytorch {

// Elements from the tensor's first to the row's first.
__device__ __forceinline__ int64_t any_row_offset(const AnyTensor& tensor, const AnyShape& shape, int64_t row) {
  if (shape.leading_count == 1) return row * tensor.leading_strides[0];
  int64_t offset = 0;
  for (int i = shape.leading_count - 1; i >= 0; --i) {
    offset += row % shape.leading[i] * tensor.leading_strides[i];
    row /= shape.leading[i];
  }
  return offset;
}

template <class T>
class AnyRow {
 public:
  __device__ __forceinline__ AnyRow(const AnyTensor& tensor, const AnyShape& shape, int64_t row)
      : start_(static_cast<const T*>(tensor.data) + any_row_offset(tensor, shape, row)),
        stride_(tensor.column_stride) {}
  __device__ __forceinline__ float operator[](int64_t column) const {
    return tile::to_float<T>(start_[column * stride_]);
  }

 private:
  const T* start_;
  int64_t stride_;
};

// A weight's or bias' value, of the rows' type or float.
template <class T>
__device__ __forceinline__ float parameter_at(const AnyTensor& parameter, bool is_float, int64_t column) {
  const int64_t offset = column * parameter.column_stride;
  return is_float ? static_cast<const float*>(parameter.data)[offset]
                  : tile::to_float<T>(static_cast<const T*>(parameter.data)[offset]);
}

}  // namespace kernel_pytorch
