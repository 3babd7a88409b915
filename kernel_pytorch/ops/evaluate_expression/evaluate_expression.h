// A score or mask function (kernel_pytorch/expression) on a whole tensor of scores on the CPU: shows what a traced
// function computes. Attention evaluates its functions tile by tile and does not call this.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::evaluate_expression {

struct Forward {
  std::string program{};    // text
  bool derivative = false;  // d result / d score in place of the result
  TensorView score{};       // fp32 [batch, heads, queries, keys], contiguous, on a CPU
  std::vector<TensorView> captured{};
  TensorView output{};  // score's shape, contiguous: fp32, or bool for a mask function
};
KP_EXPORT void forward(const Forward& arguments, Context& context);

// The output's type: fp32 or bool.
KP_EXPORT DType result_dtype(const std::string& program);

}  // namespace kernel_pytorch::evaluate_expression
