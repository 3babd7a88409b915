// The host side of the CPU kernels of the delta rule: a task is one head of one sequence.
//
// Few tokens, or where mode asks for it, go step by step from the state as the caller keeps it. Backward: states are
// kept at every kKept-th chunk while going forward, and the chunks between are computed again.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/linear_attention/delta/cpu/chunk.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

constexpr int64_t kKept = 64;
constexpr int64_t kFewTokens = 6;  // a chunk pays above

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device));
}

Rows rows_of(const TensorView& view, int64_t batch, int64_t head, DType dtype) {
  if (!view.is_present()) return {};
  auto* data = view.as<char>() + (batch * view.strides[0] + head * view.strides[2]) * size_of(view.dtype);
  return {.data = data, .stride = view.strides[1], .is_float = view.dtype == DType::kFloat32 && dtype != view.dtype};
}

// Tokens in no sequence: behind the last.
void clear_behind(const TensorView& view, int64_t end) {
  if (!view.is_present()) return;
  const int64_t token_bytes = view.strides[1] * size_of(view.dtype);
  std::fill_n(view.as<char>() + end * token_bytes, (view.sizes[1] - end) * token_bytes, 0);
}

// Pairs of bf16 are rounded operands: too few digits for the gradients of gates, which are differences of larger sums.
bool needs_digits(const Forward&) {
  return false;
}
bool needs_digits(const Backward& problem) {
  return problem.grad_gate.is_present() || problem.grad_channel_gate.is_present();
}
template <class Problem>
const DeltaKernels& kernels_of(const Problem& problem, CpuIsa isa) {
  const DType dtype = problem.query.dtype;
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16 && !needs_digits(problem) && isa >= CpuIsa::kX86V4Bf16)
    return isa_v4bf16::kBFloat16DeltaKernels;
#endif
  return KP_AT_CPU_LEVEL(isa, kDeltaKernels)[cpu_type_index(dtype)];
}

template <class Problem>
struct Work {
  const Problem& problem;
  const Sizes sizes;
  const DeltaKernels& kernels;

  Work(const Problem& all, const Context& context)
      : problem(all), sizes(all), kernels(kernels_of(all, context.info->cpu.isa)) {}
  int64_t heads() const { return sizes.sequences * sizes.heads; }
  int64_t last_token() const {
    if (!problem.cu_seqlens.is_present()) return sizes.tokens;
    return sizes.sequences == 0 ? 0 : range_of(problem, sizes.sequences - 1).end;
  }
  DeltaHead head(int64_t batch, int64_t h) const {
    const DType dtype = problem.query.dtype;
    DeltaHead head;
    head.query = rows_of(problem.query, batch, sizes.query_head(h), dtype);
    head.key = rows_of(problem.key, batch, sizes.key_head(h), dtype);
    head.value = rows_of(problem.value, batch, h, dtype);
    head.beta = rows_of(problem.beta, batch, h, dtype);
    head.gate = rows_of(problem.gate, batch, h, dtype);
    head.channel_gate = rows_of(problem.channel_gate, batch, h, dtype);
    if constexpr (requires { problem.grad_output; }) head.grad_output = rows_of(problem.grad_output, batch, h, dtype);
    head.scale = static_cast<float>(problem.scale);
    head.has_scalar = problem.gate.is_present();
    head.columns = sizes.columns;
    head.values = sizes.values;
    head.normalizes = problem.normalize_qk;
    return head;
  }
  // The state of a head of a sequence; null: there is none.
  float* state_at(const TensorView& states, int64_t index) const {
    const int64_t slot = slot_of(problem, index / sizes.heads);
    if (!states.is_present() || slot < 0) return nullptr;
    return states.as<float>() + (slot * sizes.heads + index % sizes.heads) * sizes.columns * sizes.values;
  }
  void read_state(const TensorView& states, int64_t index, float* state) const {
    kernels.read_state(state_at(states, index), sizes.columns, sizes.values, state);
  }
  void write_state(const TensorView& states, int64_t index, const float* state) const {
    if (float* to = state_at(states, index)) kernels.write_state(state, sizes.columns, sizes.values, to);
  }
  std::vector<float> state() const {
    return std::vector<float>(static_cast<size_t>(kernels.state_floats(sizes.columns, sizes.values)));
  }
  std::vector<float> workspace() const {
    return std::vector<float>(static_cast<size_t>(kernels.workspace_floats(sizes.columns, sizes.values)));
  }
};

void run_forward(const Forward& problem, int, Context& context) {
  const Work work(problem, context);
  const Sizes& sizes = work.sizes;
  clear_behind(problem.output, work.last_token());
  const bool steps =
      problem.mode == Mode::kRecurrent || (problem.mode == Mode::kAuto && sizes.tokens <= kFewTokens * sizes.sequences);
  parallel_for(context.threads, work.heads(), [&](int64_t index) {
    const Range range = range_of(problem, index / sizes.heads);
    const DeltaHead head = work.head(range.batch, index % sizes.heads);
    const Rows output = rows_of(problem.output, range.batch, index % sizes.heads, problem.output.dtype);
    if (steps) {
      std::vector<float> space(static_cast<size_t>(work.kernels.step_floats(sizes.columns)));
      return work.kernels.step(head, range.begin, range.end, work.state_at(problem.initial_state, index),
                               work.state_at(problem.final_state, index), output, space.data());
    }
    std::vector<float> state = work.state(), space = work.workspace();
    work.read_state(problem.initial_state, index, state.data());
    for (int64_t token = range.begin; token < range.end;) {
      const int64_t end = work.kernels.chunk_end(head, token, range.end);
      work.kernels.advance(head, token, end, state.data(), output, space.data());
      token = end;
    }
    work.write_state(problem.final_state, index, state.data());
  });
}

// Forward once for the states in front of every kKept-th chunk, then from the last chunk back.
void differentiate_head(const Work<Backward>& work, const DeltaHead& head, const Range& range, std::vector<float> state,
                        float* gradient, const DeltaGradients& gradients) {
  const DeltaKernels& kernels = work.kernels;
  std::vector<int64_t> bounds{range.begin};
  while (bounds.back() < range.end) bounds.push_back(kernels.chunk_end(head, bounds.back(), range.end));
  const auto chunks = static_cast<int64_t>(bounds.size()) - 1;
  std::vector<float> space = work.workspace();
  std::vector<std::vector<float>> marks;
  const auto advance = [&](int64_t chunk) {
    kernels.advance(head, bounds[chunk], bounds[chunk + 1], state.data(), {}, space.data());
  };
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk % kKept == 0) marks.push_back(state);
    if (chunk < (chunks - 1) / kKept * kKept) advance(chunk);
  }
  for (auto mark = static_cast<int64_t>(marks.size()) - 1; mark >= 0; --mark) {
    const int64_t first = mark * kKept, last = std::min(first + kKept, chunks);
    std::vector<std::vector<float>> states{marks[mark]};
    state = marks[mark];
    for (int64_t chunk = first; chunk < last - 1; ++chunk) {
      advance(chunk);
      states.push_back(state);
    }
    for (int64_t chunk = last - 1; chunk >= first; --chunk) {
      kernels.differentiate(head, bounds[chunk], bounds[chunk + 1], states[chunk - first].data(), gradient, gradients,
                            space.data());
    }
    marks.pop_back();
  }
}

void run_backward(const Backward& problem, int, Context& context) {
  const Work work(problem, context);
  const Sizes& sizes = work.sizes;
  const DType dtype = problem.query.dtype;
  for (const TensorView* view : {&problem.grad_query, &problem.grad_key, &problem.grad_value, &problem.grad_beta,
                                 &problem.grad_gate, &problem.grad_channel_gate}) {
    clear_behind(*view, work.last_token());
  }
  parallel_for(context.threads, work.heads(), [&](int64_t index) {
    const Range range = range_of(problem, index / sizes.heads);
    const int64_t h = index % sizes.heads;
    DeltaGradients gradients;
    gradients.query = rows_of(problem.grad_query, range.batch, h, dtype);
    gradients.key = rows_of(problem.grad_key, range.batch, h, dtype);
    gradients.value = rows_of(problem.grad_value, range.batch, h, dtype);
    gradients.beta = rows_of(problem.grad_beta, range.batch, h, dtype);
    gradients.gate = rows_of(problem.grad_gate, range.batch, h, dtype);
    gradients.channel_gate = rows_of(problem.grad_channel_gate, range.batch, h, dtype);
    std::vector<float> state = work.state(), gradient = work.state();
    work.read_state(problem.initial_state, index, state.data());
    work.read_state(problem.grad_final_state, index, gradient.data());
    differentiate_head(work, work.head(range.batch, h), range, std::move(state), gradient.data(), gradients);
    work.write_state(problem.grad_initial_state, index, gradient.data());
  });
}

uint64_t code_version() {
  return hash_text("delta_rule cpu 4");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::linear_attention::delta
