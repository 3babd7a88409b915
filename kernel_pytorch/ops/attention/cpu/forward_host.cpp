// The host side of the forward on the CPU: keys and values packed by all threads, then blocks of queries handed out one
// by one, a head after the other (its panels stay in the caches) and its longest first.
#include <limits>

#include "kernel_pytorch/ops/attention/cpu/plan.h"
#include "kernel_pytorch/ops/attention/cpu/programs.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::attention {
namespace {

constexpr int64_t kWaveFloats = int64_t{64} << 20;  // of packed keys and values at a time: what a head needs, or 256 MB

// The panels of one key head of one sequence, and the tasks that read them.
struct Panels {
  const Sequence* sequence = nullptr;
  int64_t key_head = 0;
  int64_t query_blocks = 0;
  int64_t first_task = 0, first_pack = 0;  // of the wave
  bool in_task = false;                    // so few queries that each task packs for itself
  float* keys = nullptr;
  float* values = nullptr;
  PackedKeys packed{};
};

struct Wave {
  const ForwardProblem& problem;
  const CpuPlan& plan;
  const TileKernels& kernels;

  int64_t padded_keys(const Sequence& sequence) const { return round_up(sequence.keys, kernels.key_alignment); }
  int64_t key_floats(const Sequence& sequence) const {
    return padded_keys(sequence) * kernels.transposed_floats(problem.query.sizes[3]);
  }
  int64_t value_floats(const Sequence& sequence) const {
    return padded_keys(sequence) * kernels.row_floats(problem.value.sizes[3]);
  }
  int64_t floats_of(const Panels& panels) const {
    if (panels.in_task) return 0;
    return round_up(key_floats(*panels.sequence), 64) + round_up(value_floats(*panels.sequence), 64);
  }
  void pack(const Panels& panels, int64_t block) const;
  void run_task(const Panels& panels, int64_t task, float* buffer, void* workspace) const;
};

void Wave::pack(const Panels& panels, int64_t block) const {
  const Sequence& sequence = *panels.sequence;
  const int64_t begin = block * kPackRows, end = std::min(sequence.keys, begin + kPackRows);
  const int64_t size = problem.query.sizes[3], value_size = problem.value.sizes[3];
  kernels.pack_transposed({.dtype = problem.query.dtype,
                           .rows = head_rows(problem.key, sequence.batch, panels.key_head, sequence.first_key),
                           .begin = begin,
                           .end = end,
                           .size = size,
                           .to = panels.keys,
                           .padded_rows = padded_keys(sequence)});
  kernels.pack_rows({.dtype = problem.query.dtype,
                     .rows = head_rows(problem.value, sequence.batch, panels.key_head, sequence.first_key),
                     .begin = begin,
                     .end = end,
                     .size = value_size,
                     .to = panels.values,
                     .padded_rows = padded_keys(sequence)});
}

void Wave::run_task(const Panels& panels, int64_t task, float* buffer, void* workspace) const {
  const Sequence& sequence = *panels.sequence;
  const int64_t head = panels.key_head * plan.group() + task / panels.query_blocks;
  // Under causality the last block has most to do.
  const CpuPlan::QueryBlock block = plan.query_block(sequence, panels.query_blocks - 1 - task % panels.query_blocks);
  if (block.rows == 0) return;
  ScoreRules rules = plan.rules_of(sequence, head);
  rules.program_workspace = workspace;
  std::vector<KeySpan> spans;
  plan.find_spans(sequence, head, block.first, spans);
  const HeadRows output = head_rows(problem.output, sequence.batch, head, sequence.first_query);
  float* lse = nullptr;
  if (problem.lse.is_present()) {
    const int64_t row = (sequence.batch * plan.heads() + head) * problem.lse.sizes[2] + sequence.first_query;
    lse = problem.lse.as<float>() + row;
  }
  kernels.forward({.rules = &rules,
                   .first_query = block.first,
                   .rows = block.rows,
                   .query = head_rows(problem.query, sequence.batch, head, sequence.first_query),
                   .key = head_rows(problem.key, sequence.batch, panels.key_head, sequence.first_key),
                   .value = head_rows(problem.value, sequence.batch, panels.key_head, sequence.first_key),
                   .packed = panels.in_task ? nullptr : &panels.packed,
                   .spans = spans.data(),
                   .span_count = static_cast<int64_t>(spans.size()),
                   .output = const_cast<void*>(output.data),
                   .output_dtype = problem.output.dtype,
                   .output_row_stride = output.row_stride,
                   .lse = lse,
                   .accumulate = problem.accumulate,
                   .buffer = buffer});
}

std::vector<Panels> all_panels(const CpuPlan& plan) {
  std::vector<const Sequence*> sequences;
  for (const Sequence& sequence : plan.sequences()) {
    if (sequence.queries > 0) sequences.push_back(&sequence);
  }
  std::ranges::stable_sort(sequences, std::greater<>(), [&](const Sequence* s) { return plan.work_of(*s); });
  std::vector<Panels> all;
  for (const Sequence* sequence : sequences) {
    for (int64_t key_head = 0; key_head < plan.key_heads(); ++key_head) {
      const int64_t blocks = plan.query_blocks(*sequence);
      all.push_back(
          {.sequence = sequence, .key_head = key_head, .query_blocks = blocks, .in_task = blocks * plan.group() <= 2});
    }
  }
  return all;
}

// What belongs to no sequence.
void clear_rest(const ForwardProblem& problem, const CpuPlan& plan) {
  if (problem.accumulate) return;
  const int64_t queries = problem.query.sizes[2], value_size = problem.value.sizes[3];
  for (int64_t head = 0; plan.queries_end() < queries && head < plan.heads(); ++head) {
    for (int64_t row = plan.queries_end(); row < queries; ++row) {
      const HeadRows output = head_rows(problem.output, 0, head, row);
      std::fill_n(static_cast<char*>(const_cast<void*>(output.data)), value_size * size_of(problem.output.dtype), 0);
      if (problem.lse.is_present())
        problem.lse.as<float>()[head * queries + row] = -std::numeric_limits<float>::infinity();
    }
  }
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device));
}
registry::Support supports_amx(const ForwardProblem& problem, const DeviceInfo& device) {
  const char* obstacle = cpu_obstacle(problem.query.dtype, device);
  return registry::Support::unless(obstacle != nullptr ? obstacle : amx_obstacle(problem.query, device));
}

}  // namespace

void run_forward(const ForwardProblem& problem, const TileKernels& kernels, Context& context) {
  const auto programs = CpuPrograms::make(problem.scoring, {}, *context.info);
  const CpuPlan plan(problem.query, problem.key, problem.value, problem.scoring, kernels.query_tile, programs.get());
  const Wave wave{problem, plan, kernels};
  clear_rest(problem, plan);
  std::vector<Panels> all = all_panels(plan);
  if (all.empty()) return;

  const int64_t workers = context.threads == nullptr ? 1 : context.threads->count();
  // Behind a task's own floats, what programs need.
  const int64_t own_floats = kernels.forward_buffer_floats(problem.query.sizes[3], problem.value.sizes[3]);
  const int64_t program_bytes = programs == nullptr ? 0 : static_cast<int64_t>(programs->workspace_bytes());
  const int64_t buffer_floats = own_floats + round_up(program_bytes, 256) / 4;
  float* buffers = allocate_floats(context, workers * buffer_floats);
  int64_t total = 0, largest = 0;
  for (const Panels& panels : all) {
    total += wave.floats_of(panels);
    largest = std::max(largest, wave.floats_of(panels));
  }
  const int64_t wave_floats = std::max(std::min(total, kWaveFloats), largest);
  float* packed = allocate_floats(context, wave_floats);

  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    int64_t used = 0, tasks = 0, packs = 0;
    for (end = begin; end < all.size() && (end == begin || used + wave.floats_of(all[end]) <= wave_floats); ++end) {
      Panels& panels = all[end];
      panels.first_task = tasks;
      panels.first_pack = packs;
      tasks += panels.query_blocks * plan.group();
      if (panels.in_task) continue;
      packs += (panels.sequence->keys + kPackRows - 1) / kPackRows;
      panels.keys = packed + used;
      panels.values = panels.keys + round_up(wave.key_floats(*panels.sequence), 64);
      panels.packed = {
          .transposed_keys = panels.keys, .rows = panels.values, .padded_keys = wave.padded_keys(*panels.sequence)};
      used += wave.floats_of(panels);
    }
    const std::span<const Panels> now(all.data() + begin, end - begin);
    parallel_for(context.threads, packs, [&](int64_t pack) {
      const Panels& panels = find_range(now, &Panels::first_pack, pack);
      wave.pack(panels, pack - panels.first_pack);
    });
    for_tasks(context, tasks, buffers, buffer_floats, [&](int64_t task, float* buffer) {
      const Panels& panels = find_range(now, &Panels::first_task, task);
      wave.run_task(panels, task - panels.first_task, buffer, buffer + own_floats);
    });
  }
}

constinit const registry::Kernel<ForwardProblem> kForwardCpu{
    .name = "cpu_tiles", .supports = supports_forward, .run = [](const ForwardProblem& problem, int, Context& context) {
      run_forward(problem, tile_kernels(*context.info), context);
    }};
constinit const registry::Kernel<ForwardProblem> kForwardCpuAmx{
    .name = "cpu_amx", .supports = supports_amx, .run = [](const ForwardProblem& problem, int, Context& context) {
      run_forward(problem, amx_kernels(), context);
    }};

}  // namespace kernel_pytorch::attention
