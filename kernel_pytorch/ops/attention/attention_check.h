// The checks of attention: what kernels may rely on afterwards. Every failure names the op, the argument, both values
// and the cure.
#pragma once

#include "kernel_pytorch/ops/attention/attention.h"

namespace kernel_pytorch::attention {

void check_forward(const Forward& arguments, const Context& context);
void check_backward(const Backward& arguments, const Context& context);

}  // namespace kernel_pytorch::attention
