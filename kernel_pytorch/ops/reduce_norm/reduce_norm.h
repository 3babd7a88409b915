// The L2 norm of a list of tensors taken as one vector: what clipping of gradients needs.
//
//   output = sqrt(sum over all elements of all tensors of element^2)
//
// Any number of tensors of any shapes; each fills its memory without gaps, in any order of dimensions (gradients do).
// Types: fp32, bf16, fp16, mixed as they come, and fp64 on the CPU; output is one fp32 (fp64 where any tensor is).
// Chunks of 16,384 elements are summed in fp32 (fp64 on the CPU), then the chunks in fp64 in their order: the result is
// bitwise repeatable, and on the CPU the same for every number of threads. NaN and infinity propagate; squares above
// 3.4e38 are infinite on the GPU, as in torch. An empty list has norm 0.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::reduce_norm {

struct Norm {
  std::vector<TensorView> tensors{};
  TensorView output{};  // one element
};
inline constexpr auto kFields =
    fields<Norm>(input<&Norm::tensors>(), output<&Norm::output>({.shape = "()", .dtype = "statistic tensors"}));

// Throws Error{kInvalidArgument} naming the tensor, both values and the cure.
KP_EXPORT void norm(const Norm& arguments, Context& context);

}  // namespace kernel_pytorch::reduce_norm
