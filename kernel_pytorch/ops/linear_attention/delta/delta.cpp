#include "kernel_pytorch/ops/linear_attention/delta/delta.h"

#include "kernel_pytorch/ops/linear_attention/checks.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

constexpr std::string_view kOp = "delta_rule";

template <class Problem>
Checks check_beta(const Problem& problem, Device device) {
  const Checks checks = check_inputs(kOp, problem, device);
  const Sizes sizes(problem);
  checks.place("beta", problem.beta, 3);
  checks.gate("beta", problem.beta, {sizes.batch, sizes.tokens, sizes.heads});
  return checks;
}

// On a GPU the kernel skips a slot outside the pool.
void check_slots(const Forward& problem, const Context& context) {
  if (!problem.state_index.is_present() || context.device().kind != DeviceKind::kCpu) return;
  const int64_t slots = problem.initial_state.sizes[0];
  for (int64_t i = 0; i < problem.state_index.sizes[0]; ++i) {
    const int64_t slot = slot_of(problem, i);
    KP_CHECK(slot >= -1 && slot < slots, kOp, ": state_index[", i, "] is ", slot, ", the pool has ", slots,
             " states; name one of them, or -1 for none");
  }
}

}  // namespace

void check(const Forward& problem, Device device) {
  const Checks checks = check_beta(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
  int64_t states = sizes.sequences;
  if (problem.state_index.is_present()) {
    checks.shape("state_index", problem.state_index, {sizes.sequences});
    const DType type = problem.state_index.dtype;
    KP_CHECK(type == DType::kInt32 || type == DType::kInt64, kOp, ": state_index is ", type,
             "; convert it to int32 or int64");
    KP_CHECK(is_contiguous(problem.state_index), kOp, ": state_index is ", problem.state_index,
             "; it must be contiguous");
    checks.place("initial_state", problem.initial_state, 4);
    KP_CHECK(problem.final_state.data == problem.initial_state.data, kOp,
             ": state_index is given, but initial_state is not written in place; use the form that does");
    states = problem.initial_state.sizes[0];
  }
  KP_CHECK(problem.output.is_present(), kOp, ": output is missing");
  checks.result("initial_state", problem.initial_state, {states, sizes.heads, sizes.columns, sizes.values}, state);
  checks.result("output", problem.output, {sizes.batch, sizes.tokens, sizes.heads, sizes.values}, dtype);
  checks.result("final_state", problem.final_state, {states, sizes.heads, sizes.columns, sizes.values}, state);
}

void check(const Backward& problem, Device device) {
  const Checks checks = check_beta(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
  checks.shape("grad_output", problem.grad_output, {sizes.batch, sizes.tokens, sizes.heads, sizes.values});
  checks.type("grad_output", problem.grad_output, dtype);
  checks.dense("grad_output", problem.grad_output);
  for (const auto& [name, view] :
       {std::pair{"initial_state", &problem.initial_state}, std::pair{"grad_final_state", &problem.grad_final_state},
        std::pair{"grad_initial_state", &problem.grad_initial_state}}) {
    checks.result(name, *view, {sizes.sequences, sizes.heads, sizes.columns, sizes.values}, state);
  }
  KP_CHECK(problem.grad_query.is_present() && problem.grad_key.is_present() && problem.grad_value.is_present() &&
               problem.grad_beta.is_present(),
           kOp, ": grad_query, grad_key, grad_value or grad_beta is missing");
  checks.result("grad_query", problem.grad_query, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns}, dtype);
  checks.result("grad_key", problem.grad_key, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns}, dtype);
  checks.result("grad_value", problem.grad_value, {sizes.batch, sizes.tokens, sizes.heads, sizes.values}, dtype);
  checks.result("grad_beta", problem.grad_beta, {sizes.batch, sizes.tokens, sizes.heads}, problem.beta.dtype);
  const auto of = [&](std::string_view name, const TensorView& gradient, const TensorView& input) {
    KP_CHECK(!gradient.is_present() || input.is_present(), kOp, ": ", name, " is asked for, but its input is absent");
  };
  of("grad_gate", problem.grad_gate, problem.gate);
  of("grad_channel_gate", problem.grad_channel_gate, problem.channel_gate);
  of("grad_initial_state", problem.grad_initial_state, problem.initial_state);
  checks.result("grad_gate", problem.grad_gate, {sizes.batch, sizes.tokens, sizes.heads}, problem.gate.dtype);
  checks.result("grad_channel_gate", problem.grad_channel_gate, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns},
                problem.channel_gate.dtype);
}

void forward(const Forward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(kOp, arguments, context);
  check_slots(arguments, context);
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(kOp, arguments, context);
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::linear_attention::delta
