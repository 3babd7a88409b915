// The kernels of attention, best first, the reference last, and how tests and the tuner see a problem.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/ops/attention/check.h"
#include "kernel_pytorch/ops/attention/cuda/alignment_cuda.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/attention/shapes.h"
#include "kernel_pytorch/ops/attention/trial.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::attention {
namespace {

// 0: absent; else which dimensions are broadcast.
int64_t kind_of(const TensorView& pair) {
  if (!pair.is_present()) return 0;
  int64_t kind = 1;
  for (int i = 0; i < 3; ++i) kind = kind * 2 + (pair.strides[i] == 0);
  return kind;
}

// What supports, configs and a tuned choice may depend on.
template <class Problem>
void describe_problem(const Problem& problem, tuning::KeyBuilder& key) {
  const Scoring& scoring = problem.scoring;
  const Sizes sizes = sizes_of(problem);
  const DType dtype = problem.query.dtype;
  key.field("sequences", tuning::bucket(sizes.sequences));
  key.field("heads", sizes.heads);
  key.field("key_heads", sizes.key_heads);
  key.field("queries", tuning::bucket(sizes.longest_query));
  key.field("keys", tuning::bucket(sizes.longest_key));
  key.field("size", sizes.size);
  key.field("value_size", sizes.value_size);
  key.field("dtype", dtype);
  key.field("packed", scoring.is_packed() ? tuning::bucket(sizes.queries) : 0);
  key.field("causal_offset", scoring.causal_offset.has_value());
  key.field("window_left", tuning::bucket(scoring.window_left));
  key.field("window_right", tuning::bucket(scoring.window_right));
  key.field("bias_kind", kind_of(scoring.bias));
  key.field("mask_kind", kind_of(scoring.mask));
  key.field("query_block", scoring.block_list.query_block);
  key.field("key_block", scoring.block_list.key_block);
  key.field("part", scoring.is_part());
  key.field("allow_tf32", scoring.allow_tf32 && dtype == DType::kFloat32);
  key.field("captured", static_cast<int64_t>(scoring.captured.size()));
  registry::describe_fields(kOptions, static_cast<const Options*>(&scoring), key);
}

void describe_forward(const ForwardProblem& problem, tuning::KeyBuilder& key) {
  describe_problem(problem, key);
  const bool is_aligned = has_aligned_rows(problem.query) && has_aligned_rows(problem.key) &&
                          has_aligned_rows(problem.value) && has_aligned_rows(problem.output);
  key.field("aligned", is_aligned);
  key.field("lse", problem.lse.is_present());
  key.field("output", problem.output.dtype);
  key.field("accumulate", problem.accumulate);
}
void describe_backward(const BackwardProblem& problem, tuning::KeyBuilder& key) {
  describe_problem(problem, key);
  bool is_aligned = true;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.output, &problem.grad_output,
                                 &problem.grad_query, &problem.grad_key, &problem.grad_value}) {
    is_aligned = is_aligned && has_aligned_rows(*view);
  }
  key.field("aligned", is_aligned);
  key.field("gradients", problem.grad_query.dtype);
  key.field("accumulate", problem.accumulate);
  key.field("writes_keys", problem.writes_keys);
  key.field("grad_lse", problem.grad_lse.is_present());
  key.field("grad_bias", problem.grad_bias.is_present());
  key.field("grad_sinks", problem.grad_sinks.is_present());
  key.field("grad_captured", std::ranges::count_if(problem.grad_captured, &TensorView::is_present));
}

struct Visit : registry::PresentTensors {
  void scoring(Scoring& scoring) const {
    using enum registry::Role;
    BlockList& list = scoring.block_list;
    (*this)("key_counts", kInput, list.key_counts);
    (*this)("key_blocks", kInput, list.key_blocks);
    (*this)("full_key_counts", kInput, list.full_key_counts);
    (*this)("full_key_blocks", kInput, list.full_key_blocks);
    (*this)("query_counts", kInput, list.query_counts);
    (*this)("query_blocks", kInput, list.query_blocks);
    (*this)("full_query_counts", kInput, list.full_query_counts);
    (*this)("full_query_blocks", kInput, list.full_query_blocks);
    registry::visit_fields(kOptions, static_cast<Options*>(&scoring), visit, state);
  }
};

void visit_forward(ForwardProblem& problem, registry::TensorVisitor visit, void* state) {
  const Visit call{{visit, state}};
  using enum registry::Role;
  call("query", kInput, problem.query);
  call("key", kInput, problem.key);
  call("value", kInput, problem.value);
  call.scoring(problem.scoring);
  const registry::Role result = problem.accumulate ? kUpdated : kOutput;
  call("output", result, problem.output);
  call("lse", result, problem.lse);
}
void visit_backward(BackwardProblem& problem, registry::TensorVisitor visit, void* state) {
  const Visit call{{visit, state}};
  using enum registry::Role;
  call("grad_output", kInput, problem.grad_output);
  call("query", kInput, problem.query);
  call("key", kInput, problem.key);
  call("value", kInput, problem.value);
  call("output", kInput, problem.output);
  call("lse", kInput, problem.lse);
  call("grad_lse", kInput, problem.grad_lse);
  call.scoring(problem.scoring);
  const registry::Role of_keys = problem.adds_to_keys() ? kUpdated : kOutput;
  call("grad_query", problem.accumulate ? kUpdated : kOutput, problem.grad_query);
  call("grad_key", of_keys, problem.grad_key);
  call("grad_value", of_keys, problem.grad_value);
  call("grad_bias", kOutput, problem.grad_bias);
  call("grad_sinks", kOutput, problem.grad_sinks);
  for (TensorView& view : problem.grad_captured) call("grad_captured", kOutput, view);
}

template <class Problem>
registry::Filling filling(const Problem& problem, std::string_view tensor) {
  return fill_scoring(sizes_of(problem).longest_key, tensor);
}

// Probabilities and gradients of scores are operands of the type of the query: fp32 results of 16 bits are no finer.
// tf32 has fp16's bits, and the operands of scores are rounded to it too: an error of a score, 2^-11 of its terms,
// multiplies a probability.
template <class Problem>
registry::Precision precision(const Problem& problem, std::string_view tensor, DType own) {
  if (problem.scoring.allow_tf32 && problem.query.dtype == DType::kFloat32) {
    return {DType::kFloat16, 0x1p-10};
  }
  const bool is_of_products =
      tensor == "output" || tensor == "grad_query" || tensor == "grad_key" || tensor == "grad_value";
  return {is_of_products ? problem.query.dtype : own};
}

void set_trial_forward(const ForwardProblem& problem) {
  set_trial_scoring(sizes_of(problem), problem.scoring);
}
void set_trial_backward(const BackwardProblem& problem) {
  set_trial_scoring(sizes_of(problem), problem.scoring);
  set_trial_lse(sizes_of(problem), *problem.scoring.scale, problem.lse);
}

// The sum of n clamped to 0..most over n = first, first + 1, .., first + count - 1.
double sum_of_cut(double first, double count, double most) {
  const auto sum_up_to = [&](double n) {
    return n <= 0 ? 0 : n <= most ? n * (n + 1) / 2 : most * (most + 1) / 2 + (n - most) * most;
  };
  return sum_up_to(first + count - 1) - sum_up_to(first - 1);
}

// Scores of one head that causal and window leave; what masks, lists and lengths leave is in their data.
double pairs_of(const Sizes& sizes, const Scoring& scoring) {
  const int64_t sequences = std::max<int64_t>(sizes.sequences, 1);
  const int64_t queries = scoring.is_packed() ? sizes.queries / sequences : sizes.queries;
  const int64_t keys = scoring.is_packed() ? sizes.keys / sequences : sizes.keys;
  const auto offset = static_cast<double>(scoring.offset().value_or(aligned_offset(queries, keys, keys)));
  // Query q keeps keys q + first up to q + last: those up to the last less those before the first.
  double last = static_cast<double>(keys), first = -static_cast<double>(queries);
  if (scoring.window_right >= 0) last = offset + static_cast<double>(scoring.window_right);
  if (scoring.causal) last = offset;
  if (scoring.window_left >= 0) first = offset - static_cast<double>(scoring.window_left);
  const auto rows = static_cast<double>(queries), most = static_cast<double>(keys);
  const double pairs = sum_of_cut(last + 1, rows, most) - sum_of_cut(first, rows, most);
  return pairs * static_cast<double>(sizes.sequences);
}

registry::Cost forward_cost(const ForwardProblem& problem) {
  const Sizes sizes = sizes_of(problem);
  const double pairs = pairs_of(sizes, problem.scoring) * static_cast<double>(sizes.heads);
  return {.bytes = registry::tensor_bytes(problem, visit_forward),
          .flops = static_cast<int64_t>(2 * pairs * static_cast<double>(sizes.size + sizes.value_size))};
}
registry::Cost backward_cost(const BackwardProblem& problem) {
  const Sizes sizes = sizes_of(problem);
  const double pairs = pairs_of(sizes, problem.scoring) * static_cast<double>(sizes.heads);
  return {.bytes = registry::tensor_bytes(problem, visit_backward),
          .flops = static_cast<int64_t>(2 * pairs * static_cast<double>(3 * sizes.size + 2 * sizes.value_size))};
}

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward{
    .name = "attention_forward",
    .kernels = registry::kernel_list<kForwardCudaDecode, kForwardSm90, kForwardCudaMma, kForwardCudaDouble,
                                     kForwardCpuDecode, kForwardCpuAmx, kForwardCpu, kForwardReference>,
    .describe = describe_forward,
    .visit_tensors = visit_forward,
    .filling = filling<ForwardProblem>,
    .precision = precision<ForwardProblem>,
    .set_trial_inputs = set_trial_forward,
    .make = make_forward,
    .check = registry::check_only<ForwardProblem, check>,
    .shrink = shrink_forward,
    .cost = forward_cost,
    .shapes = shapes};
constinit const registry::Operation<BackwardProblem> kBackward{
    .name = "attention_backward",
    .kernels = registry::kernel_list<kBackwardSm90, kBackwardCudaMma, kBackwardCudaDouble, kBackwardCpuAmx,
                                     kBackwardCpu, kBackwardReference>,
    .describe = describe_backward,
    .visit_tensors = visit_backward,
    .filling = filling<BackwardProblem>,
    .precision = precision<BackwardProblem>,
    .set_trial_inputs = set_trial_backward,
    .make = make_backward,
    .check = registry::check_only<BackwardProblem, check>,
    .shrink = shrink_backward,
    .cost = backward_cost,
    .shapes = shapes};

}  // namespace kernel_pytorch::attention
