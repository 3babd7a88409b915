// The end of a step of FP8 training with delayed scaling: magnitudes of all layers' tensors go into their histories,
// and the scales of the next step follow from the largest of each. One launch for up to 512 layers.
//
//   seen             = joined where it is given (magnitudes joined over processes), else the layers' amax
//   histories[i]     = histories[i + 1], the last one seen; the oldest leaves
//   peak[t]          = max over i of histories[i, t]
//   scales[t]        = clamp(peak[t] * factors[t], 2^-126, 2^126), or 1 where peak[t] is 0
//   amax             = 0
//
// amax and scales are lists, one tensor of each for a layer, all with the same number of elements; histories
// [steps, layers * elements], factors and joined [layers * elements]: the layers in the order of the lists, their
// elements behind each other. All fp32 and contiguous. A maximum is the second number where either is NaN, and products
// are fp32, so that every kernel gives the same bits. At least one step; no layers are legal.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::delayed_scales {

struct Update {
  TensorView histories{};
  std::vector<TensorView> amax{};
  std::vector<TensorView> scales{};
  TensorView factors{};
  TensorView joined{};  // optional
};

inline constexpr auto kFields = fields<Update>(
    updated<&Update::histories>({.leads = true, .memory = MemoryLayout::kContiguous, .content = "positive"}),
    updated<&Update::amax>({.content = "positive"}), updated<&Update::scales>({.content = "positive"}),
    input<&Update::factors>({.dtype = "fp32", .memory = MemoryLayout::kContiguous, .content = "positive"}),
    optional_input<&Update::joined>({.dtype = "fp32", .memory = MemoryLayout::kContiguous, .content = "positive"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void update(const Update& arguments, Context& context);

}  // namespace kernel_pytorch::delayed_scales
