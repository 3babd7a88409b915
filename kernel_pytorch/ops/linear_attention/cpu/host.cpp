// The host side of the CPU kernels: a task is one head of one sequence, or where these are fewer than threads, a part
// of its tokens. Parts take two passes: each gives its own state from zero and the product of its gates, the states are
// joined from one part to the next, and then every part knows what it begins with.
//
// A forward of few tokens, or where mode asks for it, goes step by step. Backward: states are kept at every kKept-th
// chunk while going forward, and the chunks between are computed again, so that a long sequence needs the root of its
// chunks and not all of them.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/linear_attention/cpu/chunk.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr int64_t kKept = 64;
constexpr int64_t kFewTokens = 4;     // a chunk pays above
constexpr int64_t kPartTokens = 512;  // a part has at least so many

// Pairs of bf16 are rounded operands: too few digits for the gradients of gates, which are differences of larger sums.
bool needs_digits(const Forward&) {
  return false;
}
bool needs_digits(const Backward& problem) {
  return problem.grad_gate.is_present() || problem.grad_channel_gate.is_present() || problem.grad_decay.is_present();
}
template <class Problem>
const ChunkKernels& kernels_of(const Problem& problem, CpuIsa isa) {
  const DType dtype = problem.query.dtype;
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16 && !needs_digits(problem) && isa >= CpuIsa::kX86V4Bf16)
    return isa_v4bf16::kBFloat16ChunkKernels;
#endif
  return KP_AT_CPU_LEVEL(isa, kChunkKernels)[cpu_type_index(dtype)];
}

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device));
}

Rows rows_of(const TensorView& view, int64_t batch, int64_t head, DType dtype) {
  if (!view.is_present()) return {};
  auto* data = view.as<char>() + (batch * view.strides[0] + head * view.strides[2]) * size_of(view.dtype);
  return {.data = data, .stride = view.strides[1], .is_float = view.dtype == DType::kFloat32 && dtype != view.dtype};
}

template <class Problem>
Head head_of(const Problem& problem, const Sizes& sizes, int64_t batch, int64_t head) {
  const DType dtype = problem.query.dtype;
  Head rows{.query = rows_of(problem.query, batch, sizes.query_head(head), dtype),
            .key = rows_of(problem.key, batch, sizes.key_head(head), dtype),
            .value = rows_of(problem.value, batch, head, dtype),
            .gate = rows_of(problem.gate, batch, head, dtype),
            .channel_gate = rows_of(problem.channel_gate, batch, head, dtype),
            .decay = problem.decay.is_present() ? problem.decay.template as<const float>()[head] : 0.0f,
            .scale = static_cast<float>(problem.scale),
            .has_scalar = problem.gate.is_present() || problem.decay.is_present(),
            .columns = sizes.columns,
            .values = sizes.values};
  if constexpr (requires { problem.grad_output; }) rows.grad_output = rows_of(problem.grad_output, batch, head, dtype);
  return rows;
}

// Tokens in no sequence: behind the last.
void clear_behind(const TensorView& view, int64_t end) {
  if (!view.is_present()) return;
  const int64_t token_bytes = view.strides[1] * size_of(view.dtype);
  std::fill_n(view.as<char>() + end * token_bytes, (view.sizes[1] - end) * token_bytes, 0);
}
template <class Problem>
int64_t last_token(const Problem& problem, const Sizes& sizes) {
  if (!problem.cu_seqlens.is_present()) return sizes.tokens;
  return sizes.sequences == 0 ? 0 : range_of(problem, sizes.sequences - 1).end;
}

// Heads of sequences, each cut into parts of equally many tokens.
template <class Problem>
struct Work {
  const Problem& problem;
  const Sizes sizes;
  const ChunkKernels& kernels;
  Context& context;
  int64_t heads, parts, state_floats;

  Work(const Problem& all, Context& of)
      : problem(all),
        sizes(all),
        kernels(kernels_of(all, of.info->cpu.isa)),
        context(of),
        heads(sizes.sequences * sizes.heads),
        parts(1),
        state_floats(kernels.state_floats(sizes.columns, sizes.values)) {
    const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
    if (heads == 0 || heads >= threads || threads == 1) return;
    int64_t longest = 0;
    for (int64_t i = 0; i < sizes.sequences; ++i) longest = std::max(longest, range_of(problem, i).count());
    parts = std::clamp<int64_t>(2 * threads / heads, 1, std::max<int64_t>(longest / kPartTokens, 1));
  }
  Range part_of(int64_t index, int64_t part) const {
    const Range range = range_of(problem, index / sizes.heads);
    const int64_t each = (range.count() + parts - 1) / parts;
    return {range.batch, std::min(range.end, range.begin + part * each),
            std::min(range.end, range.begin + (part + 1) * each)};
  }
  Head head(int64_t index) const {
    return head_of(problem, sizes, range_of(problem, index / sizes.heads).batch, index % sizes.heads);
  }
  std::vector<float> workspace() const {
    return std::vector<float>(static_cast<size_t>(kernels.workspace_floats(sizes.columns, sizes.values)));
  }
  // Null: none.
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
  std::vector<int64_t> chunks_of(const Head& head, const Range& range) const {
    std::vector<int64_t> bounds{range.begin};
    while (bounds.back() < range.end) bounds.push_back(kernels.chunk_end(head, bounds.back(), range.end));
    return bounds;
  }

  // What every part begins with, [heads, parts]; none where a head is one part. A part's own share is
  // own(head, range, state, log_total, workspace), from zero; `backwards` parts begin behind their last token.
  template <class Own>
  std::vector<float> starts(const TensorView& states, bool backwards, const Own& own) const {
    if (parts == 1) return {};
    std::vector<float> starts(static_cast<size_t>(heads * parts * state_floats), 0.0f);
    std::vector<float> totals(static_cast<size_t>(heads * parts * sizes.columns), 0.0f);
    std::vector<float> shares(starts.size(), 0.0f);
    parallel_for(context.threads, heads * parts, [&](int64_t task) {
      std::vector<float> space = workspace();
      own(head(task / parts), part_of(task / parts, task % parts), &shares[task * state_floats],
          &totals[task * sizes.columns], space.data());
    });
    parallel_for(context.threads, heads, [&](int64_t index) {
      std::vector<float> state(static_cast<size_t>(state_floats));
      read_state(states, index, state.data());
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t at = index * parts + (backwards ? parts - 1 - i : i);
        std::copy(state.begin(), state.end(), starts.begin() + at * state_floats);
        kernels.join_states(&totals[at * sizes.columns], &shares[at * state_floats], sizes.columns, sizes.values,
                            state.data());
      }
    });
    return starts;
  }
  std::vector<float> forward_starts() const {
    return starts(problem.initial_state, false,
                  [&](const Head& head, const Range& range, float* state, float* log_total, float* space) {
                    for (int64_t token = range.begin; token < range.end;) {
                      const int64_t end = kernels.chunk_end(head, token, range.end);
                      kernels.advance(head, token, end, state, {}, log_total, space);
                      token = end;
                    }
                  });
  }
  // The state that a part begins with.
  void read_start(const std::vector<float>& starts, const TensorView& states, int64_t task, float* state) const {
    if (starts.empty()) return read_state(states, task / parts, state);
    std::copy_n(starts.begin() + task * state_floats, state_floats, state);
  }
};

void run_forward(const Forward& problem, int, Context& context) {
  Work work(problem, context);
  clear_behind(problem.output, last_token(problem, work.sizes));
  const bool steps = problem.mode == Mode::kRecurrent ||
                     (problem.mode == Mode::kAuto && work.sizes.tokens <= kFewTokens * work.sizes.sequences);
  if (steps) work.parts = 1;
  const std::vector<float> starts = work.forward_starts();
  parallel_for(context.threads, work.heads * work.parts, [&](int64_t task) {
    const int64_t index = task / work.parts, part = task % work.parts;
    const Head head = work.head(index);
    const Range range = work.part_of(index, part);
    const Rows output = rows_of(problem.output, range.batch, index % work.sizes.heads, problem.output.dtype);
    std::vector<float> state(static_cast<size_t>(work.state_floats)), space = work.workspace();
    work.read_start(starts, problem.initial_state, task, state.data());
    if (steps) work.kernels.step(head, range.begin, range.end, state.data(), output, space.data());
    for (int64_t token = steps ? range.end : range.begin; token < range.end;) {
      const int64_t end = work.kernels.chunk_end(head, token, range.end);
      work.kernels.advance(head, token, end, state.data(), output, nullptr, space.data());
      token = end;
    }
    if (part == work.parts - 1) work.write_state(problem.final_state, index, state.data());
  });
}

// One part: forward once for the states in front of every kKept-th chunk, then from the last chunk back.
void differentiate_part(const Work<Backward>& work, const Head& head, const Range& range, std::vector<float> state,
                        float* gradient, const Gradients& gradients) {
  const ChunkKernels& kernels = work.kernels;
  const std::vector<int64_t> bounds = work.chunks_of(head, range);
  const auto chunks = static_cast<int64_t>(bounds.size()) - 1;
  std::vector<float> space = work.workspace();
  std::vector<std::vector<float>> marks;
  const auto advance = [&](int64_t chunk) {
    kernels.advance(head, bounds[chunk], bounds[chunk + 1], state.data(), {}, nullptr, space.data());
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
  const int64_t end = last_token(problem, sizes);
  for (const TensorView* view :
       {&problem.grad_query, &problem.grad_key, &problem.grad_value, &problem.grad_gate, &problem.grad_channel_gate}) {
    clear_behind(*view, end);
  }
  const std::vector<float> starts = work.forward_starts();
  const std::vector<float> gradient_starts =
      work.starts(problem.grad_final_state, true,
                  [&](const Head& head, const Range& range, float* state, float* log_total, float* space) {
                    const std::vector<int64_t> bounds = work.chunks_of(head, range);
                    for (auto chunk = static_cast<int64_t>(bounds.size()) - 2; chunk >= 0; --chunk) {
                      work.kernels.retreat(head, bounds[chunk], bounds[chunk + 1], state, log_total, space);
                    }
                  });
  std::vector<double> decays(static_cast<size_t>(work.heads * work.parts), 0.0);
  parallel_for(context.threads, work.heads * work.parts, [&](int64_t task) {
    const int64_t index = task / work.parts, part = task % work.parts, h = index % sizes.heads;
    const Head head = work.head(index);
    const Range range = work.part_of(index, part);
    const Gradients gradients{.query = rows_of(problem.grad_query, range.batch, h, dtype),
                              .key = rows_of(problem.grad_key, range.batch, h, dtype),
                              .value = rows_of(problem.grad_value, range.batch, h, dtype),
                              .gate = rows_of(problem.grad_gate, range.batch, h, dtype),
                              .channel_gate = rows_of(problem.grad_channel_gate, range.batch, h, dtype),
                              .decay = problem.grad_decay.is_present() ? &decays[task] : nullptr};
    std::vector<float> state(static_cast<size_t>(work.state_floats)), gradient(state.size());
    work.read_start(starts, problem.initial_state, task, state.data());
    work.read_start(gradient_starts, problem.grad_final_state, task, gradient.data());
    differentiate_part(work, head, range, std::move(state), gradient.data(), gradients);
    if (part == 0) work.write_state(problem.grad_initial_state, index, gradient.data());
  });
  for (int64_t h = 0; problem.grad_decay.is_present() && h < sizes.heads; ++h) {
    double sum = 0;
    for (int64_t sequence = 0; sequence < sizes.sequences; ++sequence) {
      for (int64_t part = 0; part < work.parts; ++part) sum += decays[(sequence * sizes.heads + h) * work.parts + part];
    }
    problem.grad_decay.as<float>()[h] = static_cast<float>(sum);
  }
}

uint64_t code_version() {
  return hash_text("linear_attention cpu 5");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::linear_attention
