// A matrix product with what surrounds it in the same pass.
//
//   v            = alpha * sum over k of a[m, k] * b[k, n]             (fp32 sums whatever the types, fp64 of fp64)
//   v           += bias[n]
//   preactivation[m, n] = v                                            (optional output: what a backward saves)
//   row_sums[m]  = sum over k of a[m, k]                               (optional: a bias gradient together with dW =
//   dY^T X) output[m, n] = form(v) + beta * residual[m, n]
//
// Forms, with f the activation (identity by default):
//   kPlain          f(v[m, n])
//   kGated          f(v[m, 2 j]) * v[m, 2 j + 1] at [m, j]: columns come in pairs (gate, up) side by side
//   kGradient       v[m, n] * f'(saved[m, n]): the product is the gradient of f's result, saved what f was taken of
//   kGatedGradient  v[m, j] * saved[m, 2 j + 1] * f'(saved[m, 2 j]) at [m, 2 j], v[m, j] * f(saved[m, 2 j]) next to it
//
// Shapes: a [batch, m, k], b [batch, k, n], output [batch, m, n] (kGated: n / 2 columns, kGatedGradient: 2 n), or all
// of them without the batch; residual and saved as the output, preactivation [batch, m, n], bias [n], row_sums [batch,
// m] dense. One of the last two strides of a and of b is 1, so that all four transpositions are views; the last stride
// of the others is 1. Batch strides of inputs may be 0. The residual may be the output itself: output += a b is beta
// = 1. Other overlaps are not allowed. Sizes of 0 are legal; a sum over nothing is 0. beta = 0 reads no residual.
//
// Types: a and b fp32, bf16 or fp16 alike, output theirs or fp32; bias, residual and saved the output's or fp32;
// preactivation the output's; row_sums a's or fp32. On the CPU also everything fp64. NaN and infinity propagate.
//
// Precision: kFull multiplies as the types say, fp32 by exact fp32 products. The others are for fp32 tensors and only
// ever what a caller asked for: kTf32 drops the lower 13 bits of a and b (CUDA), kBf16 rounds them to bf16, kBf16x3
// splits each into two bf16 and adds three products, which loses little of fp32 (relative error of a term 2^-16).
#pragma once

#include <iterator>
#include <memory>
#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/matmul/form_cuda.h"

namespace kernel_pytorch::registry {
class AnyProblem;
}

namespace kernel_pytorch::matmul {

using Kind = pointwise::Kind;
inline constexpr std::string_view kKindNames[] = {"gelu",         "gelu_tanh", "silu", "relu",
                                                  "relu_squared", "sigmoid",   "tanh", "identity"};
static_assert(std::size(kKindNames) == pointwise::kKindCount);

struct Product {
  TensorView a{};
  TensorView b{};
  double alpha = 1;
  TensorView bias{};  // optional
  Form form = Form::kPlain;
  Kind activation = Kind::kIdentity;
  TensorView saved{};     // with kGradient and kGatedGradient
  TensorView residual{};  // optional; may be the output
  double beta = 1;
  Precision precision = Precision::kFull;
  TensorView output{};
  TensorView preactivation{};  // optional
  TensorView row_sums{};       // optional
};

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

// The gradient of a gated product's pairs where no product comes before it: kGatedGradient of v = grad_output.
struct PairGradient {
  Kind activation = Kind::kSilu;
  TensorView grad_output{};  // [rows, n], the last stride 1
  TensorView saved{};        // [rows, 2 n], of grad_output's type; likewise
  TensorView grad_input{};   // as saved
};
KP_EXPORT void pair_gradient(const PairGradient& arguments, Context& context);

// The same as problems of the registry, checked, without data: for ops that are made of them, to say what their parts
// are. The device outlives the problem.
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device);
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const PairGradient& arguments, const DeviceInfo& device);

// "full", "tf32", "bf16", "bf16x3"; throws kInvalidArgument naming the words there are.
KP_EXPORT Precision precision_of(std::string_view word);

}  // namespace kernel_pytorch::matmul
