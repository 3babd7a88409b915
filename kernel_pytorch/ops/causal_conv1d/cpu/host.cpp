// The host side of the CPU kernels: a task is a block of channels of a part of one sequence's tokens. Sums of weights'
// gradients are kept per task and added in order.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/causal_conv1d/cpu/conv.h"
#include "kernel_pytorch/ops/causal_conv1d/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::causal_conv1d {
namespace {

constexpr int64_t kPartTokens = 512;

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.x.dtype, device));
}

void* at_element(const TensorView& view, int64_t element) {
  return view.is_present() ? view.as<char>() + element * size_of(view.dtype) : nullptr;
}
// Tokens in no sequence: behind the last.
template <class Problem>
void clear_behind(const Problem& problem, const Sizes& sizes, const TensorView& view) {
  if (!problem.cu_seqlens.is_present()) return;
  const int64_t end = sizes.sequences == 0 ? 0 : range_of(problem, sizes.sequences - 1).end;
  const int64_t token_bytes = sizes.channels * size_of(view.dtype);
  std::fill_n(view.as<char>() + end * token_bytes, (sizes.tokens - end) * token_bytes, 0);
}

template <class Problem>
struct Work {
  const Problem& problem;
  const Sizes sizes;
  const ConvKernels& kernels;
  std::vector<Part> parts;

  Work(const Problem& all, const TensorView& output, const Context& context)
      : problem(all),
        sizes(all),
        kernels(KP_AT_CPU_LEVEL(context.info->cpu.isa, kConvKernels)[cpu_type_index(all.x.dtype)]) {
    for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
      const Range range = range_of(problem, sequence);
      for (int64_t channel = 0; channel < sizes.channels; channel += kBlockChannels) {
        // A sequence without tokens is one part: its states have gradients.
        for (int64_t first = range.begin; first == range.begin || first < range.end; first += kPartTokens) {
          parts.push_back(part_of(range, sequence, channel, first, output));
        }
      }
    }
  }
  Part part_of(const Range& range, int64_t sequence, int64_t channel, int64_t first, const TensorView& output) const {
    const int64_t state = sequence * (sizes.width - 1) * sizes.channels + channel;
    Part part;
    part.x = at_element(problem.x, range.batch * problem.x.strides[0] + channel);
    part.x_stride = problem.x.strides[1];
    part.output = at_element(output, range.batch * sizes.tokens * sizes.channels + channel);
    part.output_stride = part.state_stride = sizes.channels;
    part.initial = at_element(problem.initial_state, state);
    part.weight = at_element(problem.weight, channel * sizes.width);
    part.bias = at_element(problem.bias, channel);
    part.channels = std::min(kBlockChannels, sizes.channels - channel);
    part.width = sizes.width;
    part.first = first;
    part.last = std::min(range.end, first + kPartTokens);
    part.begin = range.begin;
    part.end = range.end;
    part.silu = problem.activation == Activation::kSilu;
    if constexpr (requires { problem.grad_output; }) {
      part.grad_output = at_element(problem.grad_output, range.batch * problem.grad_output.strides[0] + channel);
      part.grad_stride = problem.grad_output.strides[1];
      part.grad_final = at_element(problem.grad_final_state, state);
      part.grad_initial = at_element(problem.grad_initial_state, state);
    }
    return part;
  }
};

// Ascending and behind all outputs: in place nothing is read that was written.
void write_final_states(const Forward& problem, const Sizes& sizes) {
  const int64_t row_bytes = sizes.channels * size_of(problem.x.dtype), kept = sizes.width - 1;
  for (int64_t sequence = 0; problem.final_state.is_present() && sequence < sizes.sequences; ++sequence) {
    const Range range = range_of(problem, sequence);
    for (int64_t i = 0; i < kept; ++i) {
      char* to = problem.final_state.as<char>() + (sequence * kept + i) * row_bytes;
      const int64_t token = range.end - kept + i;
      if (token >= range.begin) {
        const int64_t place = range.batch * problem.x.strides[0] + token * problem.x.strides[1];
        std::copy_n(static_cast<const char*>(at_element(problem.x, place)), row_bytes, to);
      } else if (problem.initial_state.is_present()) {
        const int64_t from = (sequence * kept + token - range.begin + kept) * row_bytes;
        std::copy_n(problem.initial_state.as<char>() + from, row_bytes, to);
      } else {
        std::fill_n(to, row_bytes, 0);
      }
    }
  }
}

void run_forward(const Forward& problem, int, Context& context) {
  const Work work(problem, problem.output, context);
  clear_behind(problem, work.sizes, problem.output);
  parallel_for(context.threads, static_cast<int64_t>(work.parts.size()),
               [&](int64_t index) { work.kernels.forward(work.parts[index]); });
  write_final_states(problem, work.sizes);
}

void run_backward(const Backward& problem, int, Context& context) {
  Work work(problem, problem.grad_x, context);
  const Sizes& sizes = work.sizes;
  clear_behind(problem, sizes, problem.grad_x);
  const int64_t part_floats = (sizes.width + 1) * kBlockChannels;
  std::vector<float> sums(work.parts.size() * part_floats);
  for (size_t i = 0; i < work.parts.size(); ++i) {
    work.parts[i].grad_weight = &sums[i * part_floats];
    work.parts[i].grad_bias = work.parts[i].grad_weight + sizes.width * kBlockChannels;
  }
  parallel_for(context.threads, static_cast<int64_t>(work.parts.size()),
               [&](int64_t index) { work.kernels.backward(work.parts[index]); });
  std::vector<double> totals(static_cast<size_t>(sizes.channels * (sizes.width + 1)), 0.0);
  for (const Part& part : work.parts) {
    const auto* weight = static_cast<const char*>(part.weight);
    const int64_t first = (weight - problem.weight.as<char>()) / size_of(problem.weight.dtype) / sizes.width;
    for (int64_t c = 0; c < part.channels; ++c) {
      double* of = &totals[(first + c) * (sizes.width + 1)];
      for (int64_t i = 0; i < sizes.width; ++i) of[i] += part.grad_weight[i * kBlockChannels + c];
      of[sizes.width] += part.grad_bias[c];
    }
  }
  for (int64_t c = 0; c < sizes.channels; ++c) {
    const double* of = &totals[c * (sizes.width + 1)];
    for (int64_t i = 0; i < sizes.width; ++i) {
      store_element(problem.grad_weight.data, problem.grad_weight.dtype, c * sizes.width + i, of[i]);
    }
    if (problem.grad_bias.is_present()) {
      store_element(problem.grad_bias.data, problem.grad_bias.dtype, c, of[sizes.width]);
    }
  }
}

uint64_t code_version() {
  return hash_text("causal_conv1d cpu 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::causal_conv1d
