// Programs printed as CUDA C++: the text of "kernel_pytorch/generated.cuh" (DeviceCode::generated), which needs no
// header but our own words (CapturedTensor is that of cuda/tile/captures_cuda.h). It defines, in
// kernel_pytorch::generated, whichever of these are asked for:
//   float score_mod(float score, int32_t batch, int32_t head, int32_t query, int32_t key, const CapturedTensor*
//   captures); bool mask_mod(float score, int32_t batch, int32_t head, int32_t query, int32_t key, const
//   CapturedTensor* captures); float score_mod_gradient(float score, ..., const CapturedTensor* captures, float grad,
//   Add&& add);
// The last returns grad * d score_mod / d score and calls add(LoadN{}, offset, grad * d score_mod / d element) for each
// captured element that was read: the offset into captures[LoadN::kCapture].gradient; LoadN says what else its
// index varies by, so that a kernel can sum before it adds.
#pragma once

#include <string>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/gradient.h"

namespace kernel_pytorch::expression {

struct CudaFunctions {
  const Program* score_mod = nullptr;  // one float result
  const Program* mask_mod = nullptr;   // one bool result
  const Gradient* score_mod_gradient = nullptr;
};

// Those given have the same captures, none of them fp64: throws kInvalidArgument otherwise.
KP_EXPORT std::string cuda_text(const CudaFunctions& functions);

}  // namespace kernel_pytorch::expression
