// The checks of attention: what kernels may rely on afterwards. Every failure names the op, the argument, both values
// and the cure.
#pragma once

#include "kernel_pytorch/ops/attention/attention.h"

namespace kernel_pytorch::attention {

void check_forward(const Forward& arguments, Device device);
void check_backward(const Backward& arguments, Device device);

}  // namespace kernel_pytorch::attention
