// The engine shared by rms_norm and layer_norm: statistics of a row, then a scaled copy of it, forward and backward.
// These problems are the argument structs of both ops; each op lists the fields that it has.
//
//   value      = x (+ residual, rounded to x's type and returned as `sum`)             [rows..., columns]
//   kRms       rstd = 1 / sqrt(mean(value^2) + eps)            normal = value * rstd
//   kLayer     rstd = 1 / sqrt(var(value) + eps), biased       normal = (value - mean) * rstd
//   output     = activation(normal * (weight + weight_offset) + bias)
//
// Where x is fp32, the residual and the output may be of a 16-bit type each, and so may grad_output in backward: what
// accompanies an fp32 activation stream if GEMMs take 16 bits (torch.autocast).
//
// Statistics and sums are fp32 (fp64 where x is); rows are independent of each other, so results do not depend on the
// batch. No rows or no columns: nothing is written but zeros for the weight's gradient.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::row_norm {

enum class Norm : uint8_t { kRms, kLayer };
using Activation = pointwise::Kind;
inline constexpr std::string_view kActivations = "gelu gelu_tanh silu relu relu_squared sigmoid tanh identity";

struct ForwardProblem {
  TensorView x{};               // [rows..., columns], any strides, leading dimensions merged where strides allow
  TensorView residual{};        // optional, x's shape, any strides; x's type, or 16 bits where x is fp32
  TensorView weight{};          // optional [columns], x's type or fp32, stride 1
  TensorView bias{};            // optional, as weight (and of its type); only with kLayer
  std::optional<double> eps{};  // none: 1e-6 for kRms, 1e-5 for kLayer
  double weight_offset = 0;     // 1.0 for models that store weight - 1
  Activation activation = Activation::kIdentity;  // in fp32 (fp64 where x is), before the output is rounded
  TensorView output{};                            // x's shape, contiguous; x's type, or 16 bits where x is fp32
  TensorView sum{};                               // present with residual: x's shape and type, contiguous
  TensorView mean{};       // optional [rows] fp32 (fp64 where x is), contiguous; only with kLayer
  TensorView rstd{};       // optional, likewise
  Norm norm = Norm::kRms;  // set by the op
};

// Without the activation: its gradient is a pass ahead of this one.
// grad_input = rstd * (g - [mean(g), kLayer only] - normal * mean(g * normal)) + grad_sum,  g = grad_output * (weight +
// offset) grad_weight = sum over rows of grad_output * normal;  grad_bias = sum over rows of grad_output
struct BackwardProblem {
  TensorView grad_output{};  // [rows..., columns], any strides; the value's type, or 16 bits where that is fp32
  TensorView value{};        // what was normalised: x, or the sum; any strides, the same leading dimensions
  TensorView weight{};       // optional [columns]
  TensorView bias{};         // optional: only the type of its gradient is taken from it
  TensorView mean{};         // [rows], with kLayer
  TensorView rstd{};         // [rows]
  TensorView grad_sum{};     // optional: gradient that reached the sum, added to grad_input; any strides
  double weight_offset = 0;
  TensorView grad_input{};   // optional, contiguous; of x and of the residual alike
  TensorView grad_weight{};  // optional [columns], the weight's type; summed in a fixed order: bitwise repeatable
  TensorView grad_bias{};    // optional [columns]
  Norm norm = Norm::kRms;    // set by the op
};

}  // namespace kernel_pytorch::row_norm
