#include "kernel_pytorch/ops/linear_attention/linear_attention.h"

#include <initializer_list>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr std::string_view kOp = "linear_attention";

struct Checks {
  Device device;
  DType dtype;

  void place(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), kOp, ": ", name, " is missing");
    KP_CHECK(view.device == device, kOp, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.rank == rank, kOp, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ", rank,
             " dimensions");
  }
  void type(std::string_view name, const TensorView& view, DType wanted) const {
    KP_CHECK(view.dtype == wanted, kOp, ": ", name, " is ", view.dtype, ", it must be ", wanted, " where query is ",
             dtype, "; convert it");
  }
  void dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, kOp, ": ", name, " is ", view,
             "; its last dimension must be dense, make it contiguous");
  }
  void shape(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    place(name, view, static_cast<int>(sizes.size()));
    int dimension = 0;
    for (int64_t size : sizes) {
      KP_CHECK(view.sizes[dimension] == size, kOp, ": ", name, " has shape ", shape_text(view.shape()), "; it must be ",
               shape_text({sizes.begin(), sizes.size()}));
      ++dimension;
    }
  }
  void result(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes, DType wanted) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    type(name, view, wanted);
    KP_CHECK(is_contiguous(view), kOp, ": ", name, " is ", view, "; it must be contiguous");
  }
  void gate(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    KP_CHECK(view.dtype == dtype || (view.dtype == DType::kFloat32 && dtype != DType::kFloat64), kOp, ": ", name,
             " is ", view.dtype, ", query is ", dtype, "; convert it to that type or to fp32");
  }
};

template <class Problem>
Checks check_inputs(const Problem& problem, Device device) {
  const Checks checks{device, problem.query.dtype};
  checks.place("query", problem.query, 4);
  const DType dtype = problem.query.dtype;
  KP_CHECK(
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64,
      kOp, ": query is ", dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, kOp, ": query is fp64 on ", device,
           "; fp64 is supported on the CPU only, convert it to fp32");
  checks.place("key", problem.key, 4);
  checks.place("value", problem.value, 4);
  const Sizes sizes(problem);
  checks.shape("query", problem.query, {sizes.batch, sizes.tokens, sizes.query_heads, sizes.columns});
  checks.shape("key", problem.key, {sizes.batch, sizes.tokens, sizes.key_heads, sizes.columns});
  checks.type("key", problem.key, dtype);
  checks.type("value", problem.value, dtype);
  for (const auto& [name, heads] : {std::pair{"query", sizes.query_heads}, std::pair{"key", sizes.key_heads}}) {
    KP_CHECK(heads == sizes.heads || (heads > 0 && sizes.heads % heads == 0), kOp, ": ", name, " has ", heads,
             " heads, value has ", sizes.heads, "; the heads of value must be a multiple");
  }
  KP_CHECK(sizes.columns > 0 && sizes.values > 0, kOp, ": query has ", sizes.columns, " columns, value has ",
           sizes.values, "; each needs at least one");
  checks.dense("query", problem.query);
  checks.dense("key", problem.key);
  checks.dense("value", problem.value);
  checks.gate("gate", problem.gate, {sizes.batch, sizes.tokens, sizes.heads});
  checks.gate("channel_gate", problem.channel_gate, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns});
  if (problem.channel_gate.is_present()) checks.dense("channel_gate", problem.channel_gate);
  if (problem.cu_seqlens.is_present()) {
    const TensorView& offsets = problem.cu_seqlens;
    checks.place("cu_seqlens", offsets, 1);
    KP_CHECK(offsets.dtype == DType::kInt32 || offsets.dtype == DType::kInt64, kOp, ": cu_seqlens is ", offsets.dtype,
             "; convert it to int32 or int64");
    KP_CHECK(offsets.sizes[0] >= 1 && is_contiguous(offsets), kOp, ": cu_seqlens is ", offsets,
             "; it must be contiguous, sequences + 1 long");
    KP_CHECK(sizes.batch == 1, kOp, ": with cu_seqlens the batch is 1, query has ", sizes.batch,
             "; put the sequences one after another");
  }
  const DType state = statistic_type(dtype);
  checks.result("decay", problem.decay, {sizes.heads}, state);
  checks.result("initial_state", problem.initial_state, {sizes.sequences, sizes.heads, sizes.columns, sizes.values},
                state);
  return checks;
}

template <class Problem>
void check_offsets(const Problem& problem, const Context& context) {
  if (!problem.cu_seqlens.is_present()) return;
  check_offset_values({.op = kOp,
                       .name = "cu_seqlens",
                       .offsets = problem.cu_seqlens,
                       .tensor = "query",
                       .tokens = problem.value.sizes[1],
                       .begins_with_zero = true},
                      context);
}

}  // namespace

void check(const Forward& problem, Device device) {
  const Checks checks = check_inputs(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
  KP_CHECK(problem.output.is_present(), kOp, ": output is missing");
  checks.result("output", problem.output, {sizes.batch, sizes.tokens, sizes.heads, sizes.values}, dtype);
  checks.result("final_state", problem.final_state, {sizes.sequences, sizes.heads, sizes.columns, sizes.values}, state);
}

void check(const Backward& problem, Device device) {
  const Checks checks = check_inputs(problem, device);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, state = statistic_type(dtype);
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
  check_offsets(arguments, context);
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(arguments, context);
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::linear_attention
