// The references: one step after another in double, as the contract writes them; the backward keeps every state of a
// sequence and reads its formulas off the recurrence.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

using Numbers = std::vector<double>;

int64_t place_of(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t column) {
  const int64_t last = x.rank == 4 ? column * x.strides[3] : 0;
  return batch * x.strides[0] + token * x.strides[1] + head * x.strides[2] + last;
}
double at(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t column = 0) {
  return load_element(x.data, x.dtype, place_of(x, batch, token, head, column));
}
void put(const TensorView& x, int64_t batch, int64_t token, int64_t head, int64_t column, double value) {
  if (x.is_present()) store_element(x.data, x.dtype, place_of(x, batch, token, head, column), value);
}
void clear(const TensorView& view) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) store_element(view.data, view.dtype, i, 0);
}
Numbers row_of(const TensorView& x, int64_t batch, int64_t token, int64_t head) {
  Numbers row(static_cast<size_t>(x.sizes[3]));
  for (size_t i = 0; i < row.size(); ++i) row[i] = at(x, batch, token, head, static_cast<int64_t>(i));
  return row;
}
double dot(const Numbers& one, const Numbers& other) {
  double sum = 0;
  for (size_t i = 0; i < one.size(); ++i) sum += one[i] * other[i];
  return sum;
}
double inverse_norm(const Numbers& row, bool normalizes) {
  return normalizes ? 1 / std::sqrt(dot(row, row) + kNormEpsilon) : 1.0;
}

// What one head of one sequence reads.
template <class Problem>
struct Head {
  const Problem& problem;
  const Sizes sizes;
  Range range;
  int64_t head, state_place;  // of its state; -1: it has none

  Head(const Problem& all, int64_t sequence, int64_t of_head)
      : problem(all), sizes(all), range(range_of(all, sequence)), head(of_head) {
    const int64_t slot = slot_of(all, sequence);
    state_place = slot < 0 ? -1 : (slot * sizes.heads + head) * sizes.columns * sizes.values;
  }
  Numbers read_state(const TensorView& states) const {
    Numbers state(static_cast<size_t>(sizes.columns * sizes.values), 0.0);
    if (!states.is_present() || state_place < 0) return state;
    for (size_t i = 0; i < state.size(); ++i) {
      state[i] = load_element(states.data, states.dtype, state_place + static_cast<int64_t>(i));
    }
    return state;
  }
  void write_state(const TensorView& states, const Numbers& state) const {
    if (!states.is_present() || state_place < 0) return;
    for (size_t i = 0; i < state.size(); ++i) {
      store_element(states.data, states.dtype, state_place + static_cast<int64_t>(i), state[i]);
    }
  }
  double kept(int64_t token, int64_t i) const {
    double gate = 0;
    if (problem.gate.is_present()) gate += at(problem.gate, range.batch, token, head);
    if (problem.channel_gate.is_present()) gate += at(problem.channel_gate, range.batch, token, head, i);
    return std::exp(gate);
  }
};

// One token: the state decays to S', then gathers key u^T.
struct Step {
  Numbers query, key, error, u;  // normalised; error = value - S'^T key
  double query_inverse, key_inverse, beta;

  template <class Problem>
  Step(const Head<Problem>& head, int64_t token, Numbers& state)
      : query(row_of(head.problem.query, head.range.batch, token, head.sizes.query_head(head.head))),
        key(row_of(head.problem.key, head.range.batch, token, head.sizes.key_head(head.head))),
        error(row_of(head.problem.value, head.range.batch, token, head.head)),
        query_inverse(inverse_norm(query, head.problem.normalize_qk)),
        key_inverse(inverse_norm(key, head.problem.normalize_qk)),
        beta(at(head.problem.beta, head.range.batch, token, head.head)) {
    for (double& x : query) x *= query_inverse;
    for (double& x : key) x *= key_inverse;
    const size_t values = error.size();
    for (size_t i = 0; i < key.size(); ++i) {
      const double kept = head.kept(token, static_cast<int64_t>(i));
      for (size_t j = 0; j < values; ++j) {
        state[i * values + j] *= kept;
        error[j] -= key[i] * state[i * values + j];
      }
    }
    u = error;
    for (double& x : u) x *= beta;
    for (size_t i = 0; i < key.size(); ++i) {
      for (size_t j = 0; j < values; ++j) state[i * values + j] += key[i] * u[j];
    }
  }
};

void run_forward(const Forward& problem, int, Context&) {
  const Sizes sizes(problem);
  clear(problem.output);
  for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
    for (int64_t h = 0; h < sizes.heads; ++h) {
      const Head head(problem, sequence, h);
      Numbers state = head.read_state(problem.initial_state);
      for (int64_t token = head.range.begin; token < head.range.end; ++token) {
        const Step step(head, token, state);
        for (int64_t j = 0; j < sizes.values; ++j) {
          double sum = 0;
          for (int64_t i = 0; i < sizes.columns; ++i) sum += step.query[i] * state[i * sizes.values + j];
          put(problem.output, head.range.batch, token, h, j, problem.scale * sum);
        }
      }
      head.write_state(problem.final_state, state);
    }
  }
}

// The gradient of a row before its normalisation, of that behind it.
void put_row(const TensorView& to, int64_t batch, int64_t token, int64_t head, const Numbers& normed,
             const Numbers& gradient, double inverse, bool normalizes) {
  const double along = normalizes ? dot(normed, gradient) : 0.0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    put(to, batch, token, head, static_cast<int64_t>(i), inverse * (gradient[i] - normed[i] * along));
  }
}

void run_head_backward(const Backward& problem, const Head<Backward>& head) {
  const int64_t columns = head.sizes.columns, values = head.sizes.values, batch = head.range.batch;
  std::vector<Numbers> states{head.read_state(problem.initial_state)};  // before each token
  std::vector<Step> steps;
  for (int64_t token = head.range.begin; token < head.range.end; ++token) {
    states.push_back(states.back());
    steps.emplace_back(head, token, states.back());
  }
  Numbers gradient = head.read_state(problem.grad_final_state);
  for (int64_t token = head.range.end - 1; token >= head.range.begin; --token) {
    const int64_t place = token - head.range.begin;
    const Numbers &before = states[place], &after = states[place + 1];
    const Step& step = steps[place];
    Numbers grad_u(static_cast<size_t>(values), 0.0), grad_query(static_cast<size_t>(columns)), grad_key(grad_query);
    const Numbers grad_output = row_of(problem.grad_output, batch, token, head.head);
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t j = 0; j < values; ++j) {
        double& g = gradient[i * values + j];
        g += problem.scale * step.query[i] * grad_output[j];
        grad_query[i] += problem.scale * grad_output[j] * after[i * values + j];
        grad_u[j] += g * step.key[i];
      }
    }
    double grad_gate = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const double kept = head.kept(token, i);
      double grad_channel = 0;
      for (int64_t j = 0; j < values; ++j) {
        double& g = gradient[i * values + j];
        const double decayed = kept * before[i * values + j], grad_error = step.beta * grad_u[j];
        grad_key[i] += g * step.u[j] - decayed * grad_error;
        g -= step.key[i] * grad_error;
        grad_channel += g * decayed;
        g *= kept;
      }
      put(problem.grad_channel_gate, batch, token, head.head, i, grad_channel);
      grad_gate += grad_channel;
    }
    put(problem.grad_gate, batch, token, head.head, 0, grad_gate);
    put(problem.grad_beta, batch, token, head.head, 0, dot(grad_u, step.error));
    for (int64_t j = 0; j < values; ++j) put(problem.grad_value, batch, token, head.head, j, step.beta * grad_u[j]);
    put_row(problem.grad_query, batch, token, head.head, step.query, grad_query, step.query_inverse,
            problem.normalize_qk);
    put_row(problem.grad_key, batch, token, head.head, step.key, grad_key, step.key_inverse, problem.normalize_qk);
  }
  head.write_state(problem.grad_initial_state, gradient);
}

void run_backward(const Backward& problem, int, Context&) {
  const Sizes sizes(problem);
  for (const TensorView* view : {&problem.grad_query, &problem.grad_key, &problem.grad_value, &problem.grad_beta,
                                 &problem.grad_gate, &problem.grad_channel_gate}) {
    clear(*view);
  }
  for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
    for (int64_t h = 0; h < sizes.heads; ++h) run_head_backward(problem, Head(problem, sequence, h));
  }
}

uint64_t code_version() {
  return hash_text("delta_rule reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::linear_attention::delta
