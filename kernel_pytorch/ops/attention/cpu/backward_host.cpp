// The host side of the backward on the CPU. A task is a part of the query blocks of one key head: it adds to gradients
// of keys and values of its own, which are then summed in a fixed order. So results do not depend on which thread was
// faster, nothing is atomic, and few heads still keep every thread busy.
#include <cmath>

#include "kernel_pytorch/ops/attention/cpu/plan.h"
#include "kernel_pytorch/ops/attention/cpu/programs.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::attention {
namespace {

constexpr int64_t kWaveFloats = int64_t{64} << 20;
constexpr int64_t kTasksPerThread = 3;  // parts cost memory and their sum: as many as keep threads busy

// One key head of one sequence.
struct Unit {
  const Sequence* sequence = nullptr;
  int64_t key_head = 0;
  int64_t items = 0;  // query blocks of all its heads
  int64_t parts = 0;
  int64_t first_part = 0;                  // of the call
  int64_t first_task = 0, first_pack = 0;  // of the wave
  PackedKeys packed{};
  float* grads = nullptr;  // [parts]: of keys, then of values
};

class Pass {
 public:
  Pass(const BackwardProblem& problem, const CpuPlan& plan, const TileKernels& kernels, const CpuPrograms* programs,
       Context& context)
      : problem_(problem), plan_(plan), context_(context), kernels_(kernels), programs_(programs) {
    size_ = problem.query.sizes[3];
    value_size_ = problem.value.sizes[3];
    for (const Sequence& sequence : plan.sequences()) {
      longest_blocks_ = std::max(longest_blocks_, plan.query_blocks(sequence));
    }
    workers_ = context.threads == nullptr ? 1 : context.threads->count();
    own_floats_ = kernels_.backward_buffer_floats(size_, value_size_);
    const int64_t program_bytes = programs == nullptr ? 0 : static_cast<int64_t>(programs->workspace_bytes());
    buffer_floats_ = own_floats_ + round_up(program_bytes, 256) / 4;  // behind a task's own, what programs need
    buffers_ = allocate_floats(context, workers_ * buffer_floats_);
    if (problem.grad_sinks.is_present()) {
      sink_count_ = static_cast<int64_t>(plan.sequences().size()) * plan.heads() * longest_blocks_;
      sink_sums_ = allocate_floats(context, sink_count_);
      std::fill_n(sink_sums_, sink_count_, 0.0f);
    }
  }

  void run();

 private:
  // Rows of panels, padded for a register tile that begins at the last one.
  int64_t padded_keys(const Unit& unit) const { return round_up(unit.sequence->keys, kernels_.key_alignment); }
  int64_t grad_rows(const Unit& unit) const { return padded_keys(unit) + 16; }
  int64_t part_floats(const Unit& unit) const {
    return grad_rows(unit) * (kernels_.gradient_floats(size_) + kernels_.gradient_floats(value_size_));
  }
  int64_t pack_floats(const Unit& unit) const {
    const int64_t of_key = kernels_.transposed_floats(size_) + kernels_.transposed_floats(value_size_);
    return padded_keys(unit) * (of_key + kernels_.row_floats(size_)) + 3 * 64;
  }
  int64_t floats_of(const Unit& unit) const { return pack_floats(unit) + unit.parts * part_floats(unit); }

  std::vector<Unit> find_units() const;
  void place(Unit& unit, float* memory) const;
  void pack(const Unit& unit, int64_t chunk) const;
  void write(const Unit& unit, int64_t chunk) const;
  void run_part(const Unit& unit, int64_t part, float* buffer) const;
  BackwardTask task_of(const Sequence& sequence, int64_t head, int64_t block, float* buffer) const;
  void run_wave(std::span<Unit> units, float* memory) const;
  void run_bias_pass() const;
  void write_grad_sinks() const;

  const BackwardProblem& problem_;
  const CpuPlan& plan_;
  Context& context_;
  const TileKernels& kernels_;
  const CpuPrograms* programs_;  // null: none
  int64_t size_ = 0, value_size_ = 0, longest_blocks_ = 0;
  int64_t workers_ = 1, own_floats_ = 0, buffer_floats_ = 0;
  float* buffers_ = nullptr;
  float* sink_sums_ = nullptr;  // [sequence][head][block]
  int64_t sink_count_ = 0;
  float* captured_ = nullptr;  // gradients of captured tensors, one set for each part
};

// Whether no two scores share an element of the bias: then its gradient can be written where it arises.
bool bias_is_whole(const BackwardProblem& problem) {
  return std::ranges::equal(problem.grad_bias.shape(), problem.scoring.bias.shape());
}

std::vector<Unit> Pass::find_units() const {
  double total = 1;
  for (const Sequence& sequence : plan_.sequences()) {
    total += static_cast<double>(plan_.work_of(sequence)) * static_cast<double>(plan_.key_heads());
  }
  std::vector<Unit> units;
  for (const Sequence& sequence : plan_.sequences()) {
    const int64_t items = plan_.query_blocks(sequence) * plan_.group();
    const double share = static_cast<double>(plan_.work_of(sequence)) / total;
    const auto wanted = static_cast<int64_t>(std::ceil(share * static_cast<double>(kTasksPerThread * workers_)));
    const int64_t parts = std::min(workers_ == 1 ? 1 : wanted, items);
    for (int64_t key_head = 0; key_head < plan_.key_heads(); ++key_head) {
      units.push_back({.sequence = &sequence, .key_head = key_head, .items = items, .parts = parts});
    }
  }
  std::ranges::stable_sort(units, std::greater<>(), [&](const Unit& unit) { return plan_.work_of(*unit.sequence); });
  return units;
}

void Pass::place(Unit& unit, float* memory) const {
  const int64_t rows = padded_keys(unit);
  unit.packed.transposed_keys = memory;
  unit.packed.transposed_values = unit.packed.transposed_keys + round_up(rows * kernels_.transposed_floats(size_), 64);
  unit.packed.rows = unit.packed.transposed_values + round_up(rows * kernels_.transposed_floats(value_size_), 64);
  unit.packed.padded_keys = rows;
  unit.grads = memory + pack_floats(unit);
}

void Pass::pack(const Unit& unit, int64_t chunk) const {
  const Sequence& sequence = *unit.sequence;
  const int64_t begin = chunk * kPackRows, end = std::min(sequence.keys, begin + kPackRows);
  if (begin >= end || unit.parts == 0) return;
  PackTask task{.dtype = problem_.query.dtype,
                .rows = head_rows(problem_.key, sequence.batch, unit.key_head, sequence.first_key),
                .begin = begin,
                .end = end,
                .size = size_,
                .to = const_cast<float*>(unit.packed.transposed_keys),
                .padded_rows = padded_keys(unit)};
  kernels_.pack_transposed(task);
  task.to = const_cast<float*>(unit.packed.rows);
  kernels_.pack_rows(task);
  task.rows = head_rows(problem_.value, sequence.batch, unit.key_head, sequence.first_key);
  task.size = value_size_;
  task.to = const_cast<float*>(unit.packed.transposed_values);
  kernels_.pack_transposed(task);
}

BackwardTask Pass::task_of(const Sequence& sequence, int64_t head, int64_t block, float* buffer) const {
  const CpuPlan::QueryBlock queries = plan_.query_block(sequence, block);
  const int64_t key_head = head / plan_.group();
  const int64_t statistic = (sequence.batch * plan_.heads() + head) * problem_.query.sizes[2] + sequence.first_query;
  BackwardTask task{.first_query = queries.first,
                    .rows = queries.rows,
                    .query = head_rows(problem_.query, sequence.batch, head, sequence.first_query),
                    .key = head_rows(problem_.key, sequence.batch, key_head, sequence.first_key),
                    .value = head_rows(problem_.value, sequence.batch, key_head, sequence.first_key),
                    .output = head_rows(problem_.output, sequence.batch, head, sequence.first_query),
                    .grad_output = head_rows(problem_.grad_output, sequence.batch, head, sequence.first_query),
                    .lse = problem_.lse.as<const float>() + statistic};
  if (problem_.grad_lse.is_present()) task.grad_lse = problem_.grad_lse.as<const float>() + statistic;
  if (sink_sums_ != nullptr) {
    task.sink_sum = sink_sums_ + (sequence.index * plan_.heads() + head) * longest_blocks_ + block;
  }
  task.buffer = buffer;
  return task;
}

float* grad_bias_of(const TensorView& grad_bias, int64_t sequence, int64_t head) {
  const int64_t first = grad_bias.sizes[0] == 1 ? 0 : sequence, second = grad_bias.sizes[1] == 1 ? 0 : head;
  return grad_bias.as<float>() + first * grad_bias.strides[0] + second * grad_bias.strides[1];
}

void Pass::run_part(const Unit& unit, int64_t part, float* buffer) const {
  const Sequence& sequence = *unit.sequence;
  const int64_t blocks = plan_.query_blocks(sequence);
  float* grads = unit.grads + part * part_floats(unit);
  std::fill_n(grads, part_floats(unit), 0.0f);
  std::vector<KeySpan> spans;
  for (int64_t item = part; item < unit.items; item += unit.parts) {
    const int64_t head = unit.key_head * plan_.group() + item / blocks;
    BackwardTask task = task_of(sequence, head, item % blocks, buffer);
    if (task.rows == 0) continue;
    ScoreRules rules = plan_.rules_of(sequence, head);
    rules.program_workspace = buffer + own_floats_;
    if (captured_ != nullptr)
      rules.captured_gradients = captured_ + (unit.first_part + part) * programs_->gradient_floats();
    plan_.find_spans(sequence, head, task.first_query, spans);
    task.rules = &rules;
    task.packed = &unit.packed;
    task.spans = spans.data();
    task.span_count = static_cast<int64_t>(spans.size());
    const HeadRows grad_query = head_rows(problem_.grad_query, sequence.batch, head, sequence.first_query);
    task.grad_query = const_cast<void*>(grad_query.data);
    task.grad_dtype = problem_.grad_query.dtype;
    task.grad_query_row_stride = grad_query.row_stride;
    task.accumulate = problem_.accumulate;
    task.grad_keys = grads;
    task.grad_values = grads + grad_rows(unit) * kernels_.gradient_floats(size_);
    task.grad_rows = grad_rows(unit);
    if (problem_.grad_bias.is_present() && bias_is_whole(problem_)) {
      task.grad_bias = grad_bias_of(problem_.grad_bias, sequence.index, head);
      task.grad_bias_row_stride = problem_.grad_bias.strides[2];
    }
    kernels_.backward(task);
  }
}

void Pass::write(const Unit& unit, int64_t chunk) const {
  const Sequence& sequence = *unit.sequence;
  const HeadRows grad_key = head_rows(problem_.grad_key, sequence.batch, unit.key_head, sequence.first_key);
  const HeadRows grad_value = head_rows(problem_.grad_value, sequence.batch, unit.key_head, sequence.first_key);
  GradientTask task{.dtype = problem_.grad_key.dtype,
                    .parts = unit.grads,
                    .part_count = unit.parts,
                    .part_stride = part_floats(unit),
                    .part_rows = grad_rows(unit),
                    .begin = chunk * kPackRows,
                    .end = std::min(sequence.key_rows, (chunk + 1) * kPackRows),
                    .size = size_,
                    .rows_that_count = sequence.keys,
                    .factor = static_cast<float>(*problem_.scoring.scale),
                    .to = const_cast<void*>(grad_key.data),
                    .row_stride = grad_key.row_stride,
                    .accumulate = problem_.adds_to_keys()};
  kernels_.write_gradient(task);
  task.parts = unit.grads + grad_rows(unit) * kernels_.gradient_floats(size_);
  task.size = value_size_;
  task.factor = 1;
  task.to = const_cast<void*>(grad_value.data);
  task.row_stride = grad_value.row_stride;
  kernels_.write_gradient(task);
}

void Pass::run_wave(std::span<Unit> units, float* memory) const {
  int64_t tasks = 0, chunks = 0, used = 0;
  for (Unit& unit : units) {
    unit.first_task = tasks;
    unit.first_pack = chunks;
    tasks += unit.parts;
    chunks += (unit.sequence->key_rows + kPackRows - 1) / kPackRows;
    place(unit, memory + used);
    used += round_up(floats_of(unit), 64);
  }
  const std::span<const Unit> all = units;
  parallel_for(context_.threads, chunks, [&](int64_t chunk) {
    const Unit& unit = find_range(all, &Unit::first_pack, chunk);
    pack(unit, chunk - unit.first_pack);
  });
  for_tasks(context_, tasks, buffers_, buffer_floats_, [&](int64_t task, float* buffer) {
    const Unit& unit = find_range(all, &Unit::first_task, task);
    run_part(unit, task - unit.first_task, buffer);
  });
  parallel_for(context_.threads, chunks, [&](int64_t chunk) {
    const Unit& unit = find_range(all, &Unit::first_pack, chunk);
    write(unit, chunk - unit.first_pack);
  });
}

// The gradient of a bias that several scores share: tasks are its rows, each of which goes over all that share it, with
// scores computed once more.
void Pass::run_bias_pass() const {
  const TensorView& grad_bias = problem_.grad_bias;
  const bool by_query = grad_bias.sizes[2] > 1;
  const int64_t blocks = by_query ? longest_blocks_ : 1;
  const int64_t tasks = grad_bias.sizes[0] * grad_bias.sizes[1] * blocks;
  for_tasks(context_, tasks, buffers_, buffer_floats_, [&](int64_t number, float* buffer) {
    const int64_t first = number / blocks / grad_bias.sizes[1], second = number / blocks % grad_bias.sizes[1];
    std::vector<KeySpan> spans;
    for (const Sequence& sequence : plan_.sequences()) {
      if (grad_bias.sizes[0] > 1 && sequence.index != first) continue;
      for (int64_t head = 0; head < plan_.heads(); ++head) {
        if (grad_bias.sizes[1] > 1 && head != second) continue;
        ScoreRules rules = plan_.rules_of(sequence, head);
        rules.program_workspace = buffer + own_floats_;
        for (int64_t block = 0; block < plan_.query_blocks(sequence); ++block) {
          if (by_query && block != number % blocks) continue;
          BackwardTask task = task_of(sequence, head, block, buffer);
          if (task.rows == 0) continue;
          plan_.find_spans(sequence, head, task.first_query, spans);
          task.rules = &rules;
          task.spans = spans.data();
          task.span_count = static_cast<int64_t>(spans.size());
          task.sink_sum = nullptr;
          task.grad_bias = grad_bias_of(grad_bias, sequence.index, head);
          task.grad_bias_row_stride = by_query ? grad_bias.strides[2] : 0;
          kernels_.backward(task);
        }
      }
    }
  });
}

void clear_rows(const TensorView& view, int64_t first_row) {
  for (int64_t head = 0; head < view.sizes[1]; ++head) {
    for (int64_t row = first_row; row < view.sizes[2]; ++row) {
      const HeadRows rows = head_rows(view, 0, head, row);
      std::fill_n(static_cast<char*>(const_cast<void*>(rows.data)), view.sizes[3] * size_of(view.dtype), 0);
    }
  }
}

void Pass::write_grad_sinks() const {
  for (int64_t head = 0; head < plan_.heads(); ++head) {
    double sum = 0;
    for (int64_t i = 0; i < sink_count_; ++i) {
      if (i / longest_blocks_ % plan_.heads() == head) sum += sink_sums_[i];
    }
    problem_.grad_sinks.as<float>()[head] = static_cast<float>(-sum);
  }
}

void Pass::run() {
  if (problem_.grad_bias.is_present()) {
    std::fill_n(problem_.grad_bias.as<float>(), problem_.grad_bias.element_count(), 0.0f);
  }
  if (!problem_.accumulate) clear_rows(problem_.grad_query, plan_.queries_end());
  if (!problem_.adds_to_keys()) {
    clear_rows(problem_.grad_key, plan_.keys_end());
    clear_rows(problem_.grad_value, plan_.keys_end());
  }
  std::vector<Unit> units = find_units();
  int64_t total = 0, largest = 0, parts = 0;
  for (Unit& unit : units) {
    unit.first_part = parts;
    parts += unit.parts;
    total += round_up(floats_of(unit), 64);
    largest = std::max(largest, round_up(floats_of(unit), 64));
  }
  if (programs_ != nullptr && programs_->gradient_floats() > 0) {
    captured_ = allocate_floats(context_, parts * programs_->gradient_floats());
    std::fill_n(captured_, parts * programs_->gradient_floats(), 0.0f);
  }
  const int64_t wave_floats = std::max(std::min(total, kWaveFloats), largest);
  float* memory = allocate_floats(context_, wave_floats);
  for (size_t begin = 0, end = 0; begin < units.size(); begin = end) {
    int64_t used = 0;
    for (end = begin; end < units.size(); ++end) {
      used += round_up(floats_of(units[end]), 64);
      if (end > begin && used > wave_floats) break;
    }
    run_wave(std::span(units).subspan(begin, end - begin), memory);
  }
  if (problem_.grad_bias.is_present() && !bias_is_whole(problem_)) run_bias_pass();
  if (problem_.grad_sinks.is_present()) write_grad_sinks();
  if (programs_ != nullptr) programs_->write_gradients(captured_, captured_ == nullptr ? 0 : parts);
}

registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device));
}
registry::Support supports_amx(const BackwardProblem& problem, const DeviceInfo& device) {
  const char* obstacle = cpu_obstacle(problem.query.dtype, device);
  return registry::Support::unless(obstacle != nullptr ? obstacle : amx_obstacle(problem.query, device));
}

}  // namespace

void run_backward(const BackwardProblem& problem, const TileKernels& kernels, Context& context) {
  const auto programs = CpuPrograms::make(problem.scoring, problem.grad_captured, *context.info);
  const CpuPlan plan(problem.query, problem.key, problem.value, problem.scoring, kernels.backward_query_tile,
                     programs.get());
  Pass(problem, plan, kernels, programs.get(), context).run();
}

constinit const registry::Kernel<BackwardProblem> kBackwardCpu{
    .name = "cpu_tiles",
    .supports = supports_backward,
    .run = [](const BackwardProblem& problem, int, Context& context) {
      run_backward(problem, tile_kernels(*context.info), context);
    }};
constinit const registry::Kernel<BackwardProblem> kBackwardCpuAmx{
    .name = "cpu_amx", .supports = supports_amx, .run = [](const BackwardProblem& problem, int, Context& context) {
      run_backward(problem, amx_kernels(), context);
    }};

}  // namespace kernel_pytorch::attention
