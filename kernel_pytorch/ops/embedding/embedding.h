// Rows of a table by their index, and the table's gradient.
//
//   output[i, :]       = weight[indices[i], :]
//   grad_weight[r, :]  = sum over all i with indices[i] == r of grad_output[i, :], in ascending order of i
//                        (in a fixed order where a row has many); 0 for r == padding_index and rows without an index
//
// Shapes: indices of any shape, int32 or int64, contiguous; weight [rows, columns] with any strides; output and
// grad_output [indices' shape, columns]. Types: fp32, bf16, fp16, and fp64 on the CPU. Sums are fp32 (fp64 for fp64),
// rounded once, bitwise repeatable: nothing depends on timing. Empty indices, rows or columns are legal.
//
// An index outside [0, rows) is an error on the CPU. A GPU cannot stop for it without waiting: the row becomes NaN, and
// the gradient ignores it.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::embedding {

struct Forward {
  TensorView indices{};
  TensorView weight{};
  int64_t rows = 0, padding_index = -1;  // what front ends keep for the backward instead of the table
  TensorView output{};                   // contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::indices>(
        {.shape = "...", .memory = MemoryLayout::kContiguous, .trial_dtype = "indices", .content = "indices weight.0"}),
    input<&Forward::weight>({.shape = "rows columns", .bucketed = "rows", .key = KeyPart::kSizes}),
    option<&Forward::rows>({.symbolic = true}), option<&Forward::padding_index>({.trial = "padding"}),
    output<&Forward::output>({.shape = "... columns", .leads = true, .dtype = "weight"}));

struct Backward {
  TensorView grad_output{};
  TensorView indices{};
  int64_t rows = 0;            // of the table, where grad_weight is made by a front end
  int64_t padding_index = -1;  // -1: none
  TensorView grad_weight{};    // contiguous; every element is written
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... columns", .leads = true}),
    input<&Backward::indices>({.shape = "...",
                               .memory = MemoryLayout::kContiguous,
                               .trial_dtype = "indices",
                               .content = "indices grad_weight.0"}),
    option<&Backward::rows>({.symbolic = true}), option<&Backward::padding_index>({.trial = "padding"}),
    output<&Backward::grad_weight>(
        {.shape = "rows columns", .bucketed = "rows", .dtype = "grad_output", .key = KeyPart::kSizes}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::embedding
