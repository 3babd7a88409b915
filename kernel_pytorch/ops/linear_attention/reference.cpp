// The references: one step after another in double, as the contract writes them; the backward keeps every state of a
// sequence and reads its formulas off the recurrence.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::linear_attention {
namespace {

double at(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t column = 0) {
  const int64_t last = x.rank == 4 ? column * x.strides[3] : 0;
  return load_element(x.data, x.dtype, batch * x.strides[0] + token * x.strides[1] + head * x.strides[2] + last);
}
void put(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t column, double value) {
  if (!x.is_present()) return;
  const int64_t last = x.rank == 4 ? column * x.strides[3] : 0;
  const int64_t offset = batch * x.strides[0] + token * x.strides[1] + head * x.strides[2] + last;
  store_element(x.data, x.dtype, offset, value);
}
void clear(const TensorView& view) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) store_element(view.data, view.dtype, i, 0);
}

using State = std::vector<double>;  // [columns, values]

// An index below zero is none: zeros, and nothing is kept.
State read_state(const TensorView& states, int64_t index, int64_t count) {
  State state(static_cast<size_t>(count), 0.0);
  for (int64_t i = 0; states.is_present() && index >= 0 && i < count; ++i) {
    state[i] = load_element(states.data, states.dtype, index * count + i);
  }
  return state;
}
void write_state(const TensorView& states, int64_t index, const State& state) {
  const auto count = static_cast<int64_t>(state.size());
  for (int64_t i = 0; states.is_present() && index >= 0 && i < count; ++i) {
    store_element(states.data, states.dtype, index * count + i, state[i]);
  }
}

// What one head of one sequence reads.
template <class Problem>
struct Head {
  const Problem& problem;
  const Sizes sizes;
  Range range;
  int64_t sequence, head;

  Head(const Problem& all, int64_t of_sequence, int64_t of_head)
      : problem(all), sizes(all), range(range_of(all, of_sequence)), sequence(of_sequence), head(of_head) {}
  int64_t state_index() const {
    const int64_t slot = slot_of(problem, sequence);
    return slot < 0 ? -1 : slot * sizes.heads + head;
  }
  double query(int64_t token, int64_t i) const {
    return at(problem.query, range.batch, token, sizes.query_head(head), i);
  }
  double key(int64_t token, int64_t i) const { return at(problem.key, range.batch, token, sizes.key_head(head), i); }
  double value(int64_t token, int64_t j) const { return at(problem.value, range.batch, token, head, j); }
  double factor(int64_t token, int64_t i) const {
    double gate = 0;
    if (problem.gate.is_present()) gate += at(problem.gate, range.batch, token, head);
    if (problem.channel_gate.is_present()) gate += at(problem.channel_gate, range.batch, token, head, i);
    if (problem.decay.is_present()) gate += load_element(problem.decay.data, problem.decay.dtype, head);
    return std::exp(gate);
  }
  void step(State& state, int64_t token) const {
    for (int64_t i = 0; i < sizes.columns; ++i) {
      const double kept = factor(token, i), k = key(token, i);
      for (int64_t j = 0; j < sizes.values; ++j) {
        double& element = state[i * sizes.values + j];
        element = kept * element + k * value(token, j);
      }
    }
  }
};

void run_forward(const Forward& problem, int, Context&) {
  const Sizes sizes(problem);
  clear(problem.output);
  for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
    for (int64_t h = 0; h < sizes.heads; ++h) {
      const Head head(problem, sequence, h);
      State state = read_state(problem.initial_state, head.state_index(), sizes.columns * sizes.values);
      for (int64_t token = head.range.begin; token < head.range.end; ++token) {
        head.step(state, token);
        for (int64_t j = 0; j < sizes.values; ++j) {
          double sum = 0;
          for (int64_t i = 0; i < sizes.columns; ++i) sum += head.query(token, i) * state[i * sizes.values + j];
          put(problem.output, head.range.batch, token, h, j, problem.scale * sum);
        }
      }
      write_state(problem.final_state, head.state_index(), state);
    }
  }
}

// dS gathers from the end: dS_t = scale query_t grad_t^T + e^gate_(t+1) dS_(t+1).
void run_head_backward(const Backward& problem, const Head<Backward>& head, double& grad_decay) {
  const Sizes& sizes = head.sizes;
  const int64_t columns = sizes.columns, values = sizes.values, batch = head.range.batch;
  std::vector<State> states;  // before each token, and at the end
  states.push_back(read_state(problem.initial_state, head.state_index(), columns * values));
  for (int64_t token = head.range.begin; token < head.range.end; ++token) {
    states.push_back(states.back());
    head.step(states.back(), token);
  }
  State gradient = read_state(problem.grad_final_state, head.state_index(), columns * values);
  for (int64_t token = head.range.end - 1; token >= head.range.begin; --token) {
    const State &before = states[token - head.range.begin], &after = states[token - head.range.begin + 1];
    std::vector<double> grad_value(static_cast<size_t>(values), 0.0);
    double grad_gate = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const double q = problem.scale * head.query(token, i), k = head.key(token, i), kept = head.factor(token, i);
      double grad_query = 0, grad_key = 0, grad_channel = 0;
      for (int64_t j = 0; j < values; ++j) {
        const double grad_output = at(problem.grad_output, batch, token, head.head, j);
        double& g = gradient[i * values + j];
        g += q * grad_output;
        grad_query += problem.scale * grad_output * after[i * values + j];
        grad_key += g * head.value(token, j);
        grad_value[j] += g * k;
        grad_channel += g * kept * before[i * values + j];
        g *= kept;
      }
      put(problem.grad_query, batch, token, head.head, i, grad_query);
      put(problem.grad_key, batch, token, head.head, i, grad_key);
      put(problem.grad_channel_gate, batch, token, head.head, i, grad_channel);
      grad_gate += grad_channel;
    }
    for (int64_t j = 0; j < values; ++j) put(problem.grad_value, batch, token, head.head, j, grad_value[j]);
    put(problem.grad_gate, batch, token, head.head, 0, grad_gate);
    grad_decay += grad_gate;
  }
  write_state(problem.grad_initial_state, head.state_index(), gradient);
}

void run_backward(const Backward& problem, int, Context&) {
  const Sizes sizes(problem);
  for (const TensorView* view :
       {&problem.grad_query, &problem.grad_key, &problem.grad_value, &problem.grad_gate, &problem.grad_channel_gate}) {
    clear(*view);
  }
  for (int64_t h = 0; h < sizes.heads; ++h) {
    double grad_decay = 0;
    for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
      run_head_backward(problem, Head(problem, sequence, h), grad_decay);
    }
    if (problem.grad_decay.is_present()) {
      store_element(problem.grad_decay.data, problem.grad_decay.dtype, h, grad_decay);
    }
  }
}

uint64_t code_version() {
  return hash_text("linear_attention reference 2");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::linear_attention
