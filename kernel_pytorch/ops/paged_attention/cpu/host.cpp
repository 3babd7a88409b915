// The CPU kernel: tasks (tasks.h) on threads, each walked by its own (walk.h); parts of one request are merged in
// order, whoever ends last. Chunks of prompts go another way (chunk.h).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/paged_attention/cpu/chunk.h"
#include "kernel_pytorch/ops/paged_attention/cpu/walk.h"

namespace kernel_pytorch::paged_attention {
namespace {

// Merges the parts of a task's rows and stores them; the first part's outputs become the sums.
void finish(const Attend& problem, const TileKernels& kernels, const Task& task, const State* parts) {
  const int64_t group = problem.query.sizes[1] / problem.key_cache.sizes[2], columns = problem.value_cache.sizes[3];
  const int64_t pitch = padded(columns), tokens = problem.query.sizes[0], rows = task.padded_rows();
  for (int64_t index = 0; index < task.heads * task.rows; ++index) {
    const int64_t own_row = task.first_row + index % task.rows, row = index / task.rows * rows + index % task.rows;
    const int64_t head = (task.first_head + index / task.rows) * group + own_row % group;
    const int64_t token = task.request.first_query + own_row / group;
    const float slope = problem.alibi_slopes.is_present() ? problem.alibi_slopes.as<const float>()[head] : 0;
    const float shift =  // of all scores kept so far
        slope * alibi_base(problem, task.request, task.request.position(own_row / group), slope);
    const float sink = problem.sinks.is_present() ? problem.sinks.as<const float>()[head] + shift : kMinusInfinity;
    float largest = sink;
    bool has_nan = false;
    for (int64_t i = 0; i < task.parts; ++i) {
      largest = std::max(largest, parts[i].largest[row]);
      has_nan |= std::isnan(parts[i].sums[row]);
    }
    const bool is_empty = largest == kMinusInfinity && !has_nan;
    const float reference = largest == kMinusInfinity ? 0 : largest;
    float sum = std::exp(sink - reference);
    float* outputs = parts[0].outputs + row * pitch;
    for (int64_t i = 0; i < task.parts && !is_empty; ++i) {
      const float weight = std::exp(parts[i].largest[row] - reference);
      const float* from = parts[i].outputs + row * pitch;
      sum += weight * parts[i].sums[row];
      if (i == 0 && weight != 1) {
        for (int64_t j = 0; j < columns; ++j) outputs[j] = weight == 0 ? 0 : outputs[j] * weight;
      }
      if (i == 0 || weight == 0) continue;
      for (int64_t j = 0; j < columns; ++j) outputs[j] += weight * from[j];
    }
    if (is_empty) std::fill_n(outputs, columns, 0.0f);
    const int64_t place = token * problem.output.strides[0] + head * problem.output.strides[1];
    kernels.store[type_index(problem.output.dtype)](outputs, is_empty ? 0 : 1 / sum, columns,
                                                    problem.output.as<char>() + place * size_of(problem.output.dtype));
    if (problem.lse.is_present()) {
      problem.lse.as<float>()[head * tokens + token] = is_empty ? kMinusInfinity : reference + std::log(sum) - shift;
    }
  }
}

// Tokens past the last request belong to nobody.
void clear_rest(const Attend& problem) {
  const int64_t requests = problem.seq_lens.sizes[0], tokens = problem.query.sizes[0];
  if (!problem.cu_seqlens_q.is_present()) return;
  for (int64_t token = problem.cu_seqlens_q.as<const int32_t>()[requests]; token < tokens; ++token) {
    for (int64_t head = 0; head < problem.query.sizes[1]; ++head) {
      const int64_t place = token * problem.output.strides[0] + head * problem.output.strides[1];
      for (int64_t j = 0; j < problem.output.sizes[2]; ++j) {
        store_element(problem.output.data, problem.output.dtype, place + j, 0);
      }
      if (problem.lse.is_present()) problem.lse.as<float>()[head * tokens + token] = kMinusInfinity;
    }
  }
}

registry::Support supports(const Attend&, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(device));
}

void run(const Attend& problem, int, Context& context) {
  if (problem.output.element_count() == 0 && problem.query.sizes[1] == 0) return;
  clear_rest(problem);
  std::vector<bool> are_chunks(static_cast<size_t>(problem.seq_lens.sizes[0]));
  for (size_t i = 0; i < are_chunks.size(); ++i) {
    are_chunks[i] = is_chunk(problem, static_cast<int64_t>(i));
    if (are_chunks[i]) attend_chunk(problem, static_cast<int64_t>(i), context);
  }
  const std::vector<Task> tasks =
      tasks_of(problem, are_chunks, context.threads == nullptr ? 1 : context.threads->count());
  const TileKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kTileKernels);
  const int64_t pitch = padded(problem.value_cache.sizes[3]);
  const auto rows_of = [](const Task& task) { return task.heads * task.padded_rows(); };
  const auto state_in = [&](float* memory, const Task& task) {
    return State{memory, memory + rows_of(task) * pitch, memory + rows_of(task) * (pitch + 1)};
  };
  // Parts that are merged later keep their sums; a task alone keeps them until it has stored its rows.
  std::vector<State> states(tasks.size());
  int64_t floats = 0;
  for (const Task& task : tasks) floats += task.parts > 1 ? rows_of(task) * (pitch + 2) : 0;
  auto* memory = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(floats + 16) * sizeof(float)));
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].parts == 1) continue;
    states[i] = state_in(memory, tasks[i]);
    memory += rows_of(tasks[i]) * (pitch + 2);
  }
  // Whoever ends the last part of some rows merges them, in order: one region of threads, no wait between.
  std::vector<std::atomic<int64_t>> ended(tasks.size());
  parallel_for(context.threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[static_cast<size_t>(i)];
    State state = states[static_cast<size_t>(i)];
    std::vector<float> own;
    if (task.parts == 1) {
      own.resize(static_cast<size_t>(rows_of(task) * (pitch + 2)));
      state = state_in(own.data(), task);
    }
    std::fill_n(state.outputs, rows_of(task) * pitch, 0.0f);
    std::fill_n(state.largest, rows_of(task), kMinusInfinity);
    std::fill_n(state.sums, rows_of(task), 0.0f);
    Tile(problem, kernels, task, state).run();
    if (task.parts == 1) return finish(problem, kernels, task, &state);
    const auto first = static_cast<size_t>(i - task.part);
    if (ended[first].fetch_add(1, std::memory_order_acq_rel) + 1 < task.parts) return;
    finish(problem, kernels, tasks[first], states.data() + first);
  });
}

uint64_t code_version() {
  return hash_text("paged_attention cpu 6");
}

}  // namespace

constinit const registry::Kernel<Attend> kAttendCpu{
    .name = "cpu", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::paged_attention
