// The references, in double, as the contract writes them.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/causal_conv1d/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::causal_conv1d {
namespace {

double at(const TensorView& x, int64_t batch, int64_t token, int64_t channel) {
  return load_element(x.data, x.dtype, batch * x.strides[0] + token * x.strides[1] + channel * x.strides[2]);
}
void put(const TensorView& x, int64_t batch, int64_t token, int64_t channel, double value) {
  store_element(x.data, x.dtype, batch * x.strides[0] + token * x.strides[1] + channel * x.strides[2], value);
}
void clear(const TensorView& view) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) store_element(view.data, view.dtype, i, 0);
}

// One channel of one sequence. Tokens in front of its first are those of initial_state.
template <class Problem>
struct Channel {
  const Problem& problem;
  const Sizes sizes;
  Range range;
  int64_t sequence, channel;

  Channel(const Problem& all, int64_t of_sequence, int64_t of_channel)
      : problem(all), sizes(all), range(range_of(all, of_sequence)), sequence(of_sequence), channel(of_channel) {}
  double input(int64_t token) const {
    if (token >= range.begin) return at(problem.x, range.batch, token, channel);
    if (!problem.initial_state.is_present()) return 0;
    return at(problem.initial_state, sequence, token - range.begin + sizes.width - 1, channel);
  }
  double weight(int64_t i) const {
    return load_element(problem.weight.data, problem.weight.dtype, channel * sizes.width + i);
  }
  double sum(int64_t token) const {
    double sum = problem.bias.is_present() ? load_element(problem.bias.data, problem.bias.dtype, channel) : 0.0;
    for (int64_t i = 0; i < sizes.width; ++i) sum += weight(i) * input(token - sizes.width + 1 + i);
    return sum;
  }
};

void run_forward(const Forward& problem, int, Context&) {
  const Sizes sizes(problem);
  clear(problem.output);
  for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
    for (int64_t c = 0; c < sizes.channels; ++c) {
      const Channel channel(problem, sequence, c);
      for (int64_t token = channel.range.begin; token < channel.range.end; ++token) {
        const double sum = channel.sum(token);
        const bool is_silu = problem.activation == Activation::kSilu;
        put(problem.output, channel.range.batch, token, c, is_silu ? sum / (1 + std::exp(-sum)) : sum);
      }
      // Ascending: in place nothing is read that was written.
      for (int64_t i = 0; problem.final_state.is_present() && i + 1 < sizes.width; ++i) {
        put(problem.final_state, sequence, i, c, channel.input(channel.range.end - sizes.width + 1 + i));
      }
    }
  }
}

// The gradient of the sum of a token; 0 of a token of another sequence.
double grad_sum(const Channel<Backward>& channel, int64_t token) {
  const Backward& problem = channel.problem;
  if (token < channel.range.begin || token >= channel.range.end) return 0;
  const double gradient = at(problem.grad_output, channel.range.batch, token, channel.channel);
  if (problem.activation == Activation::kNone) return gradient;
  const double sum = channel.sum(token), sigmoid = 1 / (1 + std::exp(-sum));
  return gradient * sigmoid * (1 + sum * (1 - sigmoid));
}
double grad_input(const Channel<Backward>& channel, int64_t token) {
  const int64_t width = channel.sizes.width;
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += channel.weight(i) * grad_sum(channel, token + width - 1 - i);
  const int64_t kept = token - channel.range.end + width - 1;
  if (kept >= 0 && channel.problem.grad_final_state.is_present()) {
    sum += at(channel.problem.grad_final_state, channel.sequence, kept, channel.channel);
  }
  return sum;
}

void run_backward(const Backward& problem, int, Context&) {
  const Sizes sizes(problem);
  clear(problem.grad_x);
  for (int64_t c = 0; c < sizes.channels; ++c) {
    double grad_weight[kMostWidth] = {}, grad_bias = 0;
    for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
      const Channel channel(problem, sequence, c);
      for (int64_t token = channel.range.begin; token < channel.range.end; ++token) {
        const double gradient = grad_sum(channel, token);
        grad_bias += gradient;
        for (int64_t i = 0; i < sizes.width; ++i) {
          grad_weight[i] += gradient * channel.input(token - sizes.width + 1 + i);
        }
        put(problem.grad_x, channel.range.batch, token, c, grad_input(channel, token));
      }
      for (int64_t i = 0; problem.grad_initial_state.is_present() && i + 1 < sizes.width; ++i) {
        put(problem.grad_initial_state, sequence, i, c, grad_input(channel, channel.range.begin - sizes.width + 1 + i));
      }
    }
    for (int64_t i = 0; i < sizes.width; ++i) {
      store_element(problem.grad_weight.data, problem.grad_weight.dtype, c * sizes.width + i, grad_weight[i]);
    }
    if (problem.grad_bias.is_present()) store_element(problem.grad_bias.data, problem.grad_bias.dtype, c, grad_bias);
  }
}

uint64_t code_version() {
  return hash_text("causal_conv1d reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::causal_conv1d
