#include "kernel_pytorch/ops/attention/attention.h"

#include "kernel_pytorch/ops/attention/attention_check.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::attention {

void forward(const Forward& arguments, Context& context) {
  check_forward(arguments, context.device());
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check_backward(arguments, context.device());
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::attention
