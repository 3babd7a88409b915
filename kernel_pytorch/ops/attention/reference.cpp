// The reference of attention: in double, one query after another, any strides and every option. Its memory is that of
// one head; its time is that of computing every score, kept or not.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/attention/reference_rows.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::attention {
namespace {

void store(const TensorView& view, std::initializer_list<int64_t> index, double value) {
  int64_t offset = 0;
  const int64_t* stride = view.strides.data();
  for (int64_t i : index) offset += i * *stride++;
  store_element(view.data, view.dtype, offset, value);
}

double load(const TensorView& view, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  const int64_t* stride = view.strides.data();
  for (int64_t i : index) offset += i * *stride++;
  return load_element(view.data, view.dtype, offset);
}

void add(const TensorView& view, std::initializer_list<int64_t> index, double value) {
  store(view, index, load(view, index) + value);
}

double sink_of(const Scoring& scoring, int64_t head) {
  return scoring.sinks.is_present() ? load_element(scoring.sinks.data, scoring.sinks.dtype, head) : -HUGE_VAL;
}

// log(sum of exp) of the kept scores and the sink; -inf where there are none.
double lse_of(const ScoreRows& rows, double sink) {
  double largest = sink;
  for (int64_t key = 0; key < rows.keys(); ++key) {
    if (std::isnan(rows.score(key))) return rows.score(key);
    largest = std::max(largest, rows.score(key));
  }
  if (largest == -HUGE_VAL) return largest;
  double sum = std::exp(sink - largest);
  for (int64_t key = 0; key < rows.keys(); ++key) sum += std::exp(rows.score(key) - largest);
  return largest + std::log(sum);
}

// Merges a row's result of other keys (at least one) with that of these keys: log(e^a + e^b), and the share of each in
// the output.
struct Merged {
  double lse, of_others, of_these;
};
Merged merge(double others, double these) {
  const double base = std::max(others, these);
  const double first = std::exp(others - base), second = std::exp(these - base);
  return {base + std::log(first + second), first / (first + second), second / (first + second)};
}

void forward_head(const ForwardProblem& problem, const Sizes& sizes, const Sequence& sequence, int64_t head) {
  const int64_t key_head = head / sizes.group();
  const std::vector<double> queries =
      load_rows(problem.query, sequence.batch, head, sequence.first_query, sequence.queries);
  const std::vector<double> keys = load_rows(problem.key, sequence.batch, key_head, sequence.first_key, sequence.keys);
  const std::vector<double> values =
      load_rows(problem.value, sequence.batch, key_head, sequence.first_key, sequence.keys);
  ScoreRows rows(problem.scoring, sizes, sequence, head, false);
  std::vector<double> output(sizes.value_size);
  for (int64_t query = 0; query < sequence.queries; ++query) {
    rows.compute(query, queries.data() + query * sizes.size, keys.data());
    const double lse = lse_of(rows, sink_of(problem.scoring, head));
    std::ranges::fill(output, std::isnan(lse) ? lse : 0.0);  // a sink of NaN, whatever is kept
    for (int64_t key = 0; key < sequence.keys; ++key) {
      if (!rows.is_kept(key)) continue;
      const double probability = std::exp(rows.score(key) - lse) * rows.kept_by_dropout(key);
      for (int64_t i = 0; i < sizes.value_size; ++i) output[i] += probability * values[key * sizes.value_size + i];
    }
    const int64_t place = sequence.first_query + query;
    const double others = problem.accumulate ? load(problem.lse, {sequence.batch, head, place}) : -HUGE_VAL;
    const Merged merged = others == -HUGE_VAL ? Merged{lse, 0, 1} : merge(others, lse);
    for (int64_t i = 0; i < sizes.value_size; ++i) {
      double value = output[i];
      if (others != -HUGE_VAL) {
        const double before = load(problem.output, {sequence.batch, head, place, i});
        value = merged.of_others * before + merged.of_these * value;
      }
      store(problem.output, {sequence.batch, head, place, i}, value);
    }
    if (problem.lse.is_present()) store(problem.lse, {sequence.batch, head, place}, merged.lse);
  }
}

void run_forward(const ForwardProblem& problem, int, Context&) {
  const Sizes sizes = sizes_of(problem);
  if (problem.scoring.is_packed() && !problem.accumulate) {  // tokens of no sequence
    fill(problem.output, 0);
    if (problem.lse.is_present()) fill(problem.lse, -HUGE_VAL);
  }
  for (const Sequence& sequence : sequences_of(sizes, problem.scoring)) {
    for (int64_t head = 0; head < sizes.heads; ++head) forward_head(problem, sizes, sequence, head);
  }
}

// Gradients as they grow, in double: those of one key head, and those of the whole call.
struct HeadGradients {
  std::vector<double> key, value;
};
struct CallGradients {
  std::vector<double> bias, sinks;
  std::vector<std::vector<double>> captured;
};

class BackwardHead {
 public:
  BackwardHead(const BackwardProblem& problem, const Sizes& sizes, const Sequence& sequence, int64_t head)
      : problem_(problem),
        sizes_(sizes),
        sequence_(sequence),
        head_(head),
        queries_(load_rows(problem.query, sequence.batch, head, sequence.first_query, sequence.queries)),
        outputs_(load_rows(problem.output, sequence.batch, head, sequence.first_query, sequence.queries)),
        grads_(load_rows(problem.grad_output, sequence.batch, head, sequence.first_query, sequence.queries)),
        keys_(load_rows(problem.key, sequence.batch, head / sizes.group(), sequence.first_key, sequence.keys)),
        values_(load_rows(problem.value, sequence.batch, head / sizes.group(), sequence.first_key, sequence.keys)),
        rows_(problem.scoring, sizes, sequence, head, true),
        grad_query_(sizes.size) {}

  void run(HeadGradients& of_head, CallGradients& of_call) {
    for (int64_t query = 0; query < sequence_.queries; ++query) run_query(query, of_head, of_call);
  }

 private:
  void run_query(int64_t query, HeadGradients& of_head, CallGradients& of_call) {
    rows_.compute(query, queries_.data() + query * sizes_.size, keys_.data());
    const double* grad = grads_.data() + query * sizes_.value_size;
    const int64_t place = sequence_.first_query + query;
    const int64_t row = (sequence_.batch * sizes_.heads + head_) * sizes_.queries + place;
    const double lse = load_element(problem_.lse.data, problem_.lse.dtype, row);
    double delta = 0;
    for (int64_t i = 0; i < sizes_.value_size; ++i) delta += grad[i] * outputs_[query * sizes_.value_size + i];
    if (problem_.grad_lse.is_present()) delta -= load_element(problem_.grad_lse.data, problem_.grad_lse.dtype, row);
    std::ranges::fill(grad_query_, 0.0);
    for (int64_t key = 0; key < sequence_.keys; ++key) {
      if (rows_.is_kept(key)) run_pair(query, key, lse, delta, grad, of_head, of_call);
    }
    if (problem_.grad_sinks.is_present() && lse != -HUGE_VAL) {
      of_call.sinks[head_] -= std::exp(sink_of(problem_.scoring, head_) - lse) * delta;
    }
    for (int64_t i = 0; i < sizes_.size; ++i) {
      add(problem_.grad_query, {sequence_.batch, head_, place, i}, grad_query_[i]);
    }
  }

  void run_pair(int64_t query, int64_t key, double lse, double delta, const double* grad, HeadGradients& of_head,
                CallGradients& of_call) {
    const double probability = std::exp(rows_.score(key) - lse), kept = rows_.kept_by_dropout(key);
    const double of_probability = dot(grad, values_.data() + key * sizes_.value_size, sizes_.value_size);
    for (int64_t i = 0; i < sizes_.value_size; ++i) {
      of_head.value[key * sizes_.value_size + i] += probability * kept * grad[i];
    }
    const double of_score = probability * (of_probability * kept - delta);
    if (const TensorView& grad_bias = problem_.grad_bias; grad_bias.is_present()) {
      const int64_t index[] = {sequence_.index, head_, query, key};
      int64_t offset = 0;
      for (int i = 0; i < 4; ++i) offset += grad_bias.sizes[i] == 1 ? 0 : index[i] * grad_bias.strides[i];
      of_call.bias[offset] += of_score * rows_.of_bias(key);
    }
    for (const CapturedDerivative& one : rows_.of_captured(key)) {
      std::vector<double>& gradient = of_call.captured[one.capture];
      if (!gradient.empty()) gradient[one.element] += of_score * one.value;
    }
    const double of_product = of_score * rows_.of_product(key);
    for (int64_t i = 0; i < sizes_.size; ++i) {
      grad_query_[i] += of_product * keys_[key * sizes_.size + i];
      of_head.key[key * sizes_.size + i] += of_product * queries_[query * sizes_.size + i];
    }
  }

  const BackwardProblem& problem_;
  const Sizes& sizes_;
  const Sequence& sequence_;
  int64_t head_;
  std::vector<double> queries_, outputs_, grads_, keys_, values_;
  ScoreRows rows_;
  std::vector<double> grad_query_;
};

void add_rows(const TensorView& view, const Sequence& sequence, int64_t head, const std::vector<double>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / view.sizes[3], column = static_cast<int64_t>(i) % view.sizes[3];
    add(view, {sequence.batch, head, sequence.first_key + row, column}, rows[i]);
  }
}

void store_all(const TensorView& view, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) store_element(view.data, view.dtype, static_cast<int64_t>(i), values[i]);
}

void run_backward(const BackwardProblem& problem, int, Context&) {
  const Sizes sizes = sizes_of(problem);
  if (!problem.accumulate) fill(problem.grad_query, 0);
  if (!problem.adds_to_keys()) {
    fill(problem.grad_key, 0);
    fill(problem.grad_value, 0);
  }
  CallGradients of_call;
  of_call.bias.resize(problem.grad_bias.element_count());
  of_call.sinks.resize(problem.grad_sinks.element_count());
  of_call.captured.resize(problem.scoring.captured.size());
  for (size_t i = 0; i < problem.grad_captured.size(); ++i) {
    of_call.captured[i].resize(problem.grad_captured[i].element_count());
  }
  for (const Sequence& sequence : sequences_of(sizes, problem.scoring)) {
    for (int64_t key_head = 0; key_head < sizes.key_heads; ++key_head) {
      HeadGradients of_head{.key = std::vector<double>(sequence.keys * sizes.size),
                            .value = std::vector<double>(sequence.keys * sizes.value_size)};
      for (int64_t head = key_head * sizes.group(); head < (key_head + 1) * sizes.group(); ++head) {
        BackwardHead(problem, sizes, sequence, head).run(of_head, of_call);
      }
      add_rows(problem.grad_key, sequence, key_head, of_head.key);
      add_rows(problem.grad_value, sequence, key_head, of_head.value);
    }
  }
  store_all(problem.grad_bias, of_call.bias);
  store_all(problem.grad_sinks, of_call.sinks);
  for (size_t i = 0; i < problem.grad_captured.size(); ++i) store_all(problem.grad_captured[i], of_call.captured[i]);
}

uint64_t code_version() {
  return hash_text("attention reference 2");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<ForwardProblem>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardReference{.name = "reference",
                                                                     .supports = supports_on_cpu<BackwardProblem>,
                                                                     .run = run_backward,
                                                                     .source_hash = code_version};

}  // namespace kernel_pytorch::attention
