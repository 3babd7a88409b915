// Zeroes each element with probability p and divides the others by 1 - p.
//
// The bits are base/philox.h's for the element's place in the contiguous output: the same on every device, for every
// number of threads and every stride of x; p counts in steps of 1/65536, and what is kept is divided by the exact
// probability of keeping it, so the expectation is x. A dropped element is 0, whatever it was (NaN included). p = 1
// gives zeros. No mask is kept: the gradient of dropout is dropout of the gradient with the same p and seed.
//
// Shapes: x [..., columns] with any strides. Types: fp32, bf16, fp16 and fp64. Empty x is legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::dropout {

struct Forward {
  TensorView x{};
  double p = 0.5;
  TensorView seed{};    // int64[2], the seed and the offset; may be absent where p is 0
  TensorView output{};  // x's shape and type, contiguous
};
inline constexpr auto kForwardFields =
    fields<Forward>(input<&Forward::x>({.shape = "... columns", .leads = true}),
                    input<&Forward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
                    option<&Forward::p>(), output<&Forward::output>({.shape = "... columns", .dtype = "x"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure. Its own backward.
KP_EXPORT void forward(const Forward& arguments, Context& context);

}  // namespace kernel_pytorch::dropout
