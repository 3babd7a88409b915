// The engine of activation, gated_activation and dropout: one function of each element, with everything around it that
// would otherwise be a pass over memory of its own.
//
//   value  = function(gate + gate_bias)               plain
//   value  = function(gate + gate_bias) * (up + up_bias)   gated
//   output = dropout(value) + residual
//
// Arithmetic is fp32 (fp64 where the tensors are), rounded once, at the end. Dropout zeroes an element with the
// probability p and divides the others by 1 - p; its bits are base/philox.h's for the element's place in the contiguous
// output, p counting in steps of 1/65536. A dropped element is 0 whatever it was, NaN included.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::pointwise {

struct ForwardProblem {
  Kind kind = Kind::kIdentity;
  double dropout = 0;      // probability of dropping an element
  TensorView gate{};       // [rows..., columns], any strides, leading dimensions merged where strides allow
  TensorView up{};         // with a gate only: as gate
  TensorView gate_bias{};  // optional [columns], the gate's type or fp32, stride 1
  TensorView up_bias{};    // optional, as gate_bias and of its type
  TensorView residual{};   // optional, the gate's shape and type, any strides
  TensorView seed{};       // with dropout: int64[2], the seed and the offset
  TensorView output{};     // the gate's shape and type, contiguous
};

// What a problem's list gives its Operation; the ops list their own arguments for callers.
inline constexpr auto kForwardProblem = fields<ForwardProblem>(
    input<&ForwardProblem::gate>({.shape = "... columns", .leads = true}),
    optional_input<&ForwardProblem::up>({.shape = "... columns"}),
    optional_input<&ForwardProblem::gate_bias>({.shape = "columns"}),
    optional_input<&ForwardProblem::up_bias>({.shape = "columns"}),
    optional_input<&ForwardProblem::residual>({.shape = "... columns"}),
    optional_input<&ForwardProblem::seed>({.shape = "2", .content = "seeds"}),
    option<&ForwardProblem::kind>({.key = KeyPart::kValue, .choices = kKindWords}), option<&ForwardProblem::dropout>(),
    output<&ForwardProblem::output>({.shape = "... columns", .dtype = "gate"}));

// With g = grad_output where kept, divided by 1 - p, else 0:
// grad_gate = g * function'(gate + gate_bias) [* (up + up_bias)];  grad_up = g * function(gate + gate_bias)
// The biases' gradients are the sums over rows, in a fixed order: bitwise repeatable.
struct BackwardProblem {
  Kind kind = Kind::kIdentity;
  double dropout = 0;
  TensorView grad_output{};  // [rows..., columns], any strides
  TensorView gate{};         // as the forward's
  TensorView up{};
  TensorView gate_bias{};
  TensorView up_bias{};
  TensorView seed{};
  TensorView grad_gate{};       // columns of stride 1, rows may have gaps: the halves of one packed gradient
  TensorView grad_up{};         // with up; as grad_gate
  TensorView grad_gate_bias{};  // optional [columns], the bias' type
  TensorView grad_up_bias{};
};

inline constexpr auto kBackwardProblem = fields<BackwardProblem>(
    input<&BackwardProblem::grad_output>({.shape = "... columns"}),
    input<&BackwardProblem::gate>({.shape = "... columns", .leads = true}),
    optional_input<&BackwardProblem::up>({.shape = "... columns"}),
    optional_input<&BackwardProblem::gate_bias>({.shape = "columns"}),
    optional_input<&BackwardProblem::up_bias>({.shape = "columns"}),
    optional_input<&BackwardProblem::seed>({.shape = "2", .content = "seeds"}),
    option<&BackwardProblem::kind>({.key = KeyPart::kValue, .choices = kKindWords}),
    option<&BackwardProblem::dropout>(), output<&BackwardProblem::grad_gate>({.shape = "... columns", .dtype = "gate"}),
    output<&BackwardProblem::grad_up>({.shape = "... columns", .dtype = "gate"}),
    output<&BackwardProblem::grad_gate_bias>({.shape = "columns", .dtype = "gate_bias"}),
    output<&BackwardProblem::grad_up_bias>({.shape = "columns", .dtype = "up_bias"}));

// A function and its derivative in double, for references.
struct Values {
  double value;
  double derivative;
};
Values evaluate(Kind kind, double x);

std::string_view name_of(Kind kind);  // "gelu_tanh"

// The kernels of this engine, for the ops' lists (best first there).
extern const registry::Kernel<ForwardProblem> kForwardReference, kForwardCpu, kForwardCudaVector, kForwardCudaAny;
extern const registry::Kernel<BackwardProblem> kBackwardReference, kBackwardCpu, kBackwardCudaVector,
    kBackwardCudaColumns, kBackwardCudaAny;

std::span<const registry::Kernel<ForwardProblem>> forward_kernels();
std::span<const registry::Kernel<BackwardProblem>> backward_kernels();

// Options understood: kind=WORD, bias=0|1, bias_dtype=NAME, residual=0|1 (forward), dropout=NUMBER, packed=0|1 (gated:
// gate and up are the halves of rows twice as wide, and so are their gradients).
ForwardProblem make_forward(const registry::ProblemRequest& request, bool gated, std::string_view default_kind);
BackwardProblem make_backward(const registry::ProblemRequest& request, bool gated, std::string_view default_kind);

// Throws kInvalidArgument with the op, the argument, both values and the cure; leaves the problem ready for the
// kernels: leading dimensions merged. `gate_name` is what the op calls its first tensor.
void check_and_merge(std::string_view op, std::string_view gate_name, ForwardProblem& problem, Device device);
void check_and_merge(std::string_view op, std::string_view gate_name, BackwardProblem& problem, Device device);

}  // namespace kernel_pytorch::pointwise
