#include "kernel_pytorch/ops/attention/attention.h"

#include "kernel_pytorch/ops/attention/attention_bounds.h"
#include "kernel_pytorch/ops/attention/attention_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::attention {

namespace {

// With numbers that every kernel can compute with.
template <class Problem>
void run(const registry::Operation<Problem>& operation, const Problem& checked, Context& context) {
  const Sizes sizes = sizes_of(checked);
  if (has_near_numbers(checked.scoring, sizes)) return registry::run_best(operation, checked, context);
  Problem problem = checked;
  bound_numbers(problem.scoring, sizes);
  registry::run_best(operation, problem, context);
}

}  // namespace

void forward(const Forward& arguments, Context& context) {
  check_forward(arguments, context);
  run(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check_backward(arguments, context);
  run(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::attention
