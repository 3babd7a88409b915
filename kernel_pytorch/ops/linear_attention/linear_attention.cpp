#include "kernel_pytorch/ops/linear_attention/linear_attention.h"

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/linear_attention/checks.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr std::string_view kOp = "linear_attention";

template <class Problem>
Checks check_decay(const Problem& problem, Device device) {
  const Checks checks = check_inputs(kOp, problem, device);
  checks.result("decay", problem.decay, {problem.value.sizes[2]}, statistic_type(checks.dtype));
  return checks;
}

}  // namespace

void check(const Forward& problem, Device device) {
  const Checks checks = check_decay(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
  const int64_t states = check_pool(checks, problem);
  checks.result("initial_state", problem.initial_state, {states, sizes.heads, sizes.columns, sizes.values}, state);
  KP_CHECK(problem.output.is_present(), kOp, ": output is missing");
  checks.result("output", problem.output, {sizes.batch, sizes.tokens, sizes.heads, sizes.values}, dtype);
  checks.result("final_state", problem.final_state, {states, sizes.heads, sizes.columns, sizes.values}, state);
}

void check(const Backward& problem, Device device) {
  const Checks checks = check_decay(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
  checks.result("initial_state", problem.initial_state, {sizes.sequences, sizes.heads, sizes.columns, sizes.values},
                state);
  checks.shape("grad_output", problem.grad_output, {sizes.batch, sizes.tokens, sizes.heads, sizes.values});
  checks.type("grad_output", problem.grad_output, dtype);
  checks.dense("grad_output", problem.grad_output);
  checks.result("grad_final_state", problem.grad_final_state,
                {sizes.sequences, sizes.heads, sizes.columns, sizes.values}, state);
  KP_CHECK(problem.grad_query.is_present() && problem.grad_key.is_present() && problem.grad_value.is_present(), kOp,
           ": grad_query, grad_key or grad_value is missing");
  checks.result("grad_query", problem.grad_query, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns}, dtype);
  checks.result("grad_key", problem.grad_key, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns}, dtype);
  checks.result("grad_value", problem.grad_value, {sizes.batch, sizes.tokens, sizes.heads, sizes.values}, dtype);
  const auto of = [&](std::string_view name, const TensorView& gradient, const TensorView& input) {
    KP_CHECK(!gradient.is_present() || input.is_present(), kOp, ": ", name, " is asked for, but its input is absent");
  };
  of("grad_gate", problem.grad_gate, problem.gate);
  of("grad_channel_gate", problem.grad_channel_gate, problem.channel_gate);
  of("grad_decay", problem.grad_decay, problem.decay);
  of("grad_initial_state", problem.grad_initial_state, problem.initial_state);
  checks.result("grad_gate", problem.grad_gate, {sizes.batch, sizes.tokens, sizes.heads}, problem.gate.dtype);
  checks.result("grad_channel_gate", problem.grad_channel_gate, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns},
                problem.channel_gate.dtype);
  checks.result("grad_decay", problem.grad_decay, {sizes.heads}, state);
  checks.result("grad_initial_state", problem.grad_initial_state,
                {sizes.sequences, sizes.heads, sizes.columns, sizes.values}, state);
}

void forward(const Forward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(kOp, arguments, context);
  check_slots(kOp, arguments, context);
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(kOp, arguments, context);
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::linear_attention
