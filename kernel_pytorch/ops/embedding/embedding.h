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
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::embedding {

struct Forward {
  TensorView indices{};
  TensorView weight{};
  TensorView output{};  // contiguous
};

struct Backward {
  TensorView grad_output{};
  TensorView indices{};
  int64_t padding_index = -1;  // -1: none
  TensorView grad_weight{};    // contiguous; every element is written
};

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::embedding
