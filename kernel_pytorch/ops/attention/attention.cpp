#include "kernel_pytorch/ops/attention/attention.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bounds.h"
#include "kernel_pytorch/ops/attention/check.h"
#include "kernel_pytorch/ops/attention/fp8/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

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

void check_and_run(const ForwardProblem& problem, Context& context) {
  check(problem, context.device());
  check_offsets("attention", problem.scoring, sizes_of(problem), context);
  run(kForward, problem, context);
}

void check_and_run(const BackwardProblem& problem, Context& context) {
  check(problem, context.device());
  check_offsets("attention backward", problem.scoring, sizes_of(problem), context);
  run(kBackward, problem, context);
}

void forward(const Forward& arguments, Context& context) {
  check_and_run(problem_of(arguments), context);
}

void backward(const Backward& arguments, Context& context) {
  KP_CHECK(!arguments.writes_keys, "attention backward: writes_keys is for backward_part; leave it out");
  check_and_run(problem_of(arguments), context);
}

void forward_part(const Forward& arguments, Context& context) {
  ForwardProblem problem = problem_of(arguments);
  problem.accumulate = true;
  check_and_run(problem, context);
}

void backward_part(const Backward& arguments, Context& context) {
  BackwardProblem problem = problem_of(arguments);
  problem.accumulate = true;
  problem.writes_keys = arguments.writes_keys;
  check_and_run(problem, context);
}

namespace {

bool takes_double(const void* arguments, const DeviceInfo& device) {
  return bool(kForwardCudaDouble.supports(problem_of(*static_cast<const Forward*>(arguments)), device));
}
bool takes_double_backward(const void* arguments, const DeviceInfo& device) {
  return bool(kBackwardCudaDouble.supports(problem_of(*static_cast<const Backward*>(arguments)), device));
}

}  // namespace

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("attention", "attention_forward", kForwardFields,
                                                              {.double_on_gpu = takes_double}),
                   registry::plain<Backward, backward>("attention_backward", kBackwardFields,
                                                       {.double_on_gpu = takes_double_backward}),
                   registry::plain<Forward, forward_part>("attention_part_", kForwardFields,
                                                          {.shown = "first_query first_key", .updated = "output lse"}),
                   registry::plain<Backward, backward_part>(
                       "attention_part_backward_", kBackwardFields,
                       {.shown = "first_query first_key writes_keys", .updated = "grad_query grad_key grad_value"}),
                   registry::plain<fp8::Forward, fp8::forward>("attention_fp8", fp8::kForwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward, fp8::kForward>};

}  // namespace kernel_pytorch::attention
