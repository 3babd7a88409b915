// The engine shared by rms_norm and layer_norm: statistics of a row, then a scaled copy of it, forward and backward.
// The two ops check their arguments and fill these problems; the kernels of this room compute them.
//
//   value      = x (+ residual, rounded to x's type and returned as `sum`)             [rows..., columns]
//   kRms       rstd = 1 / sqrt(mean(value^2) + eps)            normal = value * rstd
//   kLayer     rstd = 1 / sqrt(var(value) + eps), biased       normal = (value - mean) * rstd
//   output     = normal * (weight + weight_offset) + bias
//
// Where x is fp32, the residual and the output may be of a 16-bit type each, and so may grad_output in backward: what
// stands beside an fp32 stream of activations when products take 16 bits (torch.autocast).
//
// Statistics and sums are fp32 (fp64 where x is); rows are independent of each other, so results do not depend on the
// batch. No rows or no columns: nothing is written but zeros for the weight's gradient.
#pragma once

#include <cstdint>
#include <span>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::row_norm {

enum class Norm : uint8_t { kRms, kLayer };

struct ForwardProblem {
  Norm norm = Norm::kRms;
  double eps = 0;
  double weight_offset = 0;
  TensorView x{};         // [rows..., columns], any strides, leading dimensions merged where strides allow
  TensorView residual{};  // optional, x's shape, any strides; x's type, or 16 bits beside fp32
  TensorView weight{};    // optional [columns], x's type or fp32, stride 1
  TensorView bias{};      // optional, as weight (and of its type)
  TensorView output{};    // x's shape, contiguous; x's type, or 16 bits beside fp32
  TensorView sum{};       // present with residual: x's shape and type, contiguous
  TensorView mean{};      // optional [rows] fp32 (fp64 where x is), contiguous; only with kLayer
  TensorView rstd{};      // optional, likewise
};

// grad_input = rstd * (g - [mean(g), kLayer only] - normal * mean(g * normal)) + grad_sum,  g = grad_output * (weight +
// offset) grad_weight = sum over rows of grad_output * normal;  grad_bias = sum over rows of grad_output
struct BackwardProblem {
  Norm norm = Norm::kRms;
  double weight_offset = 0;
  TensorView grad_output{};  // [rows..., columns], any strides; the value's type, or 16 bits beside fp32
  TensorView value{};        // what was normalised: x, or the sum; any strides, the same leading dimensions
  TensorView weight{};       // optional [columns]
  TensorView mean{};         // [rows], with kLayer
  TensorView rstd{};         // [rows]
  TensorView grad_sum{};     // optional: gradient that reached the sum, added to grad_input; any strides
  TensorView grad_input{};   // optional, contiguous
  TensorView grad_weight{};  // optional [columns], the weight's type; summed in a fixed order: bitwise repeatable
  TensorView grad_bias{};    // optional [columns]
};

// The kernels of this room, for the lists of rms_norm and layer_norm (best first there). A problem carries its `norm`,
// so the same rows serve both ops.
extern const registry::Kernel<ForwardProblem> kForwardReference, kForwardCpu, kForwardCudaWarp, kForwardCudaBlock,
    kForwardCudaBulk, kForwardCudaCluster, kForwardCudaAny;
extern const registry::Kernel<BackwardProblem> kBackwardReference, kBackwardCpu, kBackwardCudaWarp, kBackwardCudaBlock,
    kBackwardCudaBulk, kBackwardCudaCluster, kBackwardCudaAny;

// The parts of an Operation that do not depend on which norm it is (row_norm_operation.cpp).
void describe(const ForwardProblem& problem, tuning::KeyBuilder& key);
void describe(const BackwardProblem& problem, tuning::KeyBuilder& key);
using registry::TensorVisitor;
void visit_tensors(ForwardProblem& problem, TensorVisitor visit, void* state);
void visit_tensors(BackwardProblem& problem, TensorVisitor visit, void* state);
ForwardProblem shrink(const ForwardProblem& problem, int64_t elements);
BackwardProblem shrink(const BackwardProblem& problem, int64_t elements);
registry::Cost cost(const ForwardProblem& problem);
registry::Cost cost(const BackwardProblem& problem);
// Options understood: residual=0|1, weight=0|1, bias=0|1 (kLayer), weight_dtype=NAME, stats=0|1, weight_offset=NUMBER,
// output_dtype=NAME (in backward of grad_output), residual_dtype=NAME (forward only).
ForwardProblem make_forward(const registry::ProblemRequest& request, Norm norm);
BackwardProblem make_backward(const registry::ProblemRequest& request, Norm norm);

}  // namespace kernel_pytorch::row_norm
