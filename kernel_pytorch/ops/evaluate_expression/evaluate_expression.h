// A score or mask function (kernel_pytorch/expression) on a whole tensor of scores on the CPU: shows what a traced
// function computes. Attention evaluates its functions tile by tile and does not call this.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::evaluate_expression {

struct Forward {
  std::string program{};    // text
  bool derivative = false;  // d result / d score in place of the result
  TensorView score{};       // fp32 [batch, heads, queries, keys], contiguous, on a CPU
  std::vector<TensorView> captured{};
  TensorView output{};  // score's shape, contiguous: fp32, or bool for a mask function
};

// The output's type: fp32 or bool.
KP_EXPORT DType result_dtype(const std::string& program);

inline constexpr auto kFields = fields<Forward>(
    option<&Forward::program>(), input<&Forward::score>({.leads = true}), input<&Forward::captured>(),
    option<&Forward::derivative>(),
    output<&Forward::output>({.shape = "like score", .dtype = "computed", .compute_dtype = [](const void* arguments) {
                                return result_dtype(static_cast<const Forward*>(arguments)->program);
                              }}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);

}  // namespace kernel_pytorch::evaluate_expression
