// A tensor that a generated score or mask function reads, as kernels are given it: an array of these is a parameter.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::tile {

inline constexpr int kMaxCaptureRank = 8;

struct CapturedTensor {
  const void* data;
  float* gradient;  // contiguous, of the same sizes; null where none is wanted
  int64_t strides[kMaxCaptureRank];
  int32_t sizes[kMaxCaptureRank];
};

}  // namespace kernel_pytorch::tile
