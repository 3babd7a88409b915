// Root-mean-square normalisation over the last dimension.
//
//   sum    = x + residual                       (only with a residual; rounded to x's type)
//   rstd   = 1 / sqrt(mean(sum^2) + eps)        per row, fp32 (fp64 for fp64); eps is 1e-6 unless given
//   output = activation(sum * rstd * (weight + weight_offset))
//
// Shapes: x [..., columns] with any strides and any leading shape, weight [columns]. Types: fp32, bf16, fp16
// everywhere, fp64 on the CPU; the weight has x's type or fp32; if x is fp32, the residual and the output (and its
// gradient) may be bf16 or fp16. NaN and infinity propagate. Empty x is legal. All tensors live on the context's
// device.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"

namespace kernel_pytorch::rms_norm {

using Forward = row_norm::ForwardProblem;
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "... columns", .leads = true}),
    optional_input<&Forward::residual>({.shape = "... columns"}),
    optional_input<&Forward::weight>({.shape = "columns", .memory = MemoryLayout::kContiguous, .usual = true}),
    unused<&Forward::bias>(), option<&Forward::eps>({.required = true}), option<&Forward::weight_offset>(),
    option<&Forward::activation>({.key = KeyPart::kValue, .hidden = true, .choices = row_norm::kActivations}),
    output<&Forward::output>({.shape = "... columns", .dtype = "x", .dtype_option = "output_dtype"}),
    output<&Forward::sum>({.shape = "... columns", .dtype = "x", .when = "residual"}), unused<&Forward::mean>(),
    saved<&Forward::rstd>({.shape = "...", .dtype = "statistic x", .memory = MemoryLayout::kFlat, .trial = "stats"}),
    unused<&Forward::norm>());

using Backward = row_norm::BackwardProblem;
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... columns", .trial_dtype = "output_dtype"}),
    input<&Backward::value>({.shape = "... columns", .leads = true, .from = "sum or x"}),
    optional_input<&Backward::weight>({.shape = "columns", .memory = MemoryLayout::kContiguous, .usual = true}),
    unused<&Backward::bias>(), unused<&Backward::mean>(),
    input<&Backward::rstd>(
        {.shape = "...", .dtype = "statistic value", .memory = MemoryLayout::kFlat, .content = "positive"}),
    optional_input<&Backward::grad_sum>({.shape = "... columns", .dtype = "value", .trial = "residual"}),
    option<&Backward::weight_offset>(),
    output<&Backward::grad_input>({.shape = "... columns", .dtype = "value", .wanted = "input_grad"}),
    output<&Backward::grad_weight>({.shape = "columns", .dtype = "weight", .wanted = "weight_grad"}),
    unused<&Backward::grad_bias>(), unused<&Backward::norm>());

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::rms_norm
