// Softmax and log_softmax over the last dimension, with what attention and sampling do to scores in the same pass.
//
//   score  = scale * x + mask                    (mask: added; or boolean, true keeps the score and false removes it)
//   output = exp(score - max) / sum              or, with `log`, score - max - log(sum), over the row
//
// Shapes: x [..., columns] with any strides and any leading shape; mask has x's shape, any strides, 0 where it is
// broadcast. `causal` keeps columns j <= i + columns - queries, i being the index in the second-to-last dimension and
// `queries` its size (aligned bottom-right). Temperature T is scale = 1 / T.
// Types: fp32, bf16, fp16 everywhere, fp64 on the CPU; an added mask has x's type or fp32. Arithmetic is fp32 (fp64).
// A row with every score removed, by mask or causal, gives zeros (log: -inf) and no gradient. Without a mask a row of
// -inf gives NaN, as NaN and +inf do: what torch gives. Empty x is legal. `output` may be x itself where x is
// contiguous.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::softmax {

struct Forward {
  TensorView x{};
  TensorView mask{};  // optional
  double scale = 1.0;
  bool causal = false;
  bool log = false;
  TensorView output{};  // x's shape and type, contiguous
  int64_t queries = 1;  // set by the op: a row's query is row % queries
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "... columns", .leads = true}),
    optional_input<&Forward::mask>({.shape = "... columns"}), option<&Forward::scale>(),
    option<&Forward::causal>({.key = KeyPart::kValue}), option<&Forward::log>({.key = KeyPart::kValue}),
    output<&Forward::output>({.shape = "... columns", .dtype = "x", .in_place = "x"}), unused<&Forward::queries>());

//   softmax      grad_input = scale * output * (grad_output - sum(grad_output * output))
//   log_softmax  grad_input = scale * (grad_output - exp(output) * sum(grad_output))
// With `masked` a removed score (output 0, or -inf with `log`) has no gradient, as after torch's masked_fill.
struct Backward {
  TensorView grad_output{};
  TensorView output{};  // of Forward, any strides
  double scale = 1.0;
  bool log = false;
  bool masked = false;      // Forward had a mask or was causal
  TensorView grad_input{};  // contiguous; may be grad_output or output itself where that is contiguous
};
inline constexpr auto kBackwardFields =
    fields<Backward>(input<&Backward::grad_output>({.shape = "... columns"}),
                     input<&Backward::output>({.shape = "... columns", .leads = true}), option<&Backward::scale>(),
                     option<&Backward::log>({.key = KeyPart::kValue}),
                     option<&Backward::masked>({.key = KeyPart::kValue, .trial = "causal"}),
                     output<&Backward::grad_input>({.shape = "... columns", .dtype = "output"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::softmax
