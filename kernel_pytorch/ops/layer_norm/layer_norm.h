// Layer normalisation over the last dimension.
//
//   sum    = x + residual                       (only with a residual; rounded to x's type)
//   mean, var of the row (biased), fp32 (fp64 for fp64); rstd = 1 / sqrt(var + eps)
//   output = (sum - mean) * rstd * (weight + weight_offset) + bias
//
// Shapes: x [..., columns] with any strides and any leading shape, weight and bias [columns]. Types: fp32, bf16, fp16
// everywhere, fp64 on the CPU; the weight has x's type or fp32; beside an fp32 x, the residual and the output (and its
// gradient) may be bf16 or fp16. NaN and infinity propagate. Empty x is legal. All tensors live on the context's
// device.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::layer_norm {

struct Forward {
  TensorView x{};
  TensorView residual{};  // optional; x's type, or 16 bits beside fp32
  TensorView weight{};    // optional: ones
  TensorView bias{};      // optional: zeros; of the weight's type
  double eps = 1e-5;
  double weight_offset = 0.0;  // 1.0 for models that store weight - 1
  TensorView output{};         // x's shape, contiguous; x's type, or 16 bits beside fp32
  TensorView sum{};            // with residual: x's shape and type, contiguous
  TensorView mean{};           // optional [rows]: what backward needs
  TensorView rstd{};           // optional [rows], likewise
};

struct Backward {
  TensorView grad_output{};  // the value's type, or 16 bits beside fp32
  TensorView value{};        // x, or the sum where there was a residual
  TensorView weight{};       // optional
  TensorView mean{};         // [rows], from Forward
  TensorView rstd{};         // [rows], from Forward
  double weight_offset = 0.0;
  TensorView grad_sum{};     // optional: gradient of the sum output, added to grad_input
  TensorView grad_input{};   // optional; of x and of the residual alike
  TensorView grad_weight{};  // optional, the weight's type; bitwise repeatable
  TensorView grad_bias{};    // optional, likewise
};

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::layer_norm
