// Where a block finds its part of a list of tensors. Kernels take lists in their parameters (32,764 bytes of them since
// CUDA 12.1), so that a list needs no upload, may change from call to call, and is kept by a captured graph.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

inline constexpr int kMaxKernelParameterBytes = 32764;

#ifdef __CUDACC_RTC__
// The first tensor whose chunks end after `chunk`; end_of(i) does not descend.
template <class EndOf>
__device__ __forceinline__ int tensor_of_chunk(int chunk, int tensors, EndOf end_of) {
  int low = 0, high = tensors - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (end_of(middle) > chunk) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
#endif

}  // namespace kernel_pytorch
