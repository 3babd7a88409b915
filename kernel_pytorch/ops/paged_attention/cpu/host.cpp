// The host side of the CPU kernel. A task is a request, a key head, up to 64 rows (queries times the heads that share
// the keys) and, of few rows, 1024 keys or as many as a plan says: without a plan that fills the machine a request is
// cut as it alone demands, so its bits do not depend on others. Parts of one request are merged afterwards, in order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/paged_attention/plan/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr int64_t kPartKeys = 1024;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Task {
  int64_t index;  // of the request
  Request request;
  int64_t key_head;
  int64_t first_row, rows;  // a row is query * group + head of the group
  KeyRange keys;
  int64_t part, parts;  // parts of these rows are tasks in a row
};

int64_t padded(int64_t columns) {
  return (columns + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

int type_index(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return 3;
  return dtype == DType::kInt8 ? 4 : cpu_type_index(dtype);
}

const void* row_in(const TensorView& cache, int64_t page, int64_t row, int64_t head) {
  const int64_t offset = page * cache.strides[0] + row * cache.strides[1] + head * cache.strides[2];
  return cache.as<const char>() + offset * size_of(cache.dtype);
}

std::vector<Task> tasks_of(const Attend& problem) {
  std::vector<Task> tasks;
  const int64_t group = problem.query.sizes[1] / std::max<int64_t>(problem.key_cache.sizes[2], 1);
  const int64_t part_keys = planned_keys(problem, kPartKeys);
  for (int64_t index = 0; index < problem.seq_lens.sizes[0]; ++index) {
    const Request request = request_at(problem, index);
    const int64_t rows = request.queries * group;
    for (int64_t head = 0; head < problem.key_cache.sizes[2]; ++head) {
      for (int64_t first = 0; first < rows; first += kTileRows) {
        const int64_t count = std::min(kTileRows, rows - first);
        const KeyRange oldest = keys_seen(problem, request, request.position(first / group));
        const KeyRange newest = keys_seen(problem, request, request.position((first + count - 1) / group));
        const KeyRange all{oldest.first, std::max(oldest.last, newest.last)};
        const int64_t parts =
            rows > kTileRows ? 1 : std::max<int64_t>((all.last - all.first + part_keys - 1) / part_keys, 1);
        for (int64_t part = 0; part < parts; ++part) {
          KeyRange keys = all;
          if (parts > 1) keys = {all.first + part * part_keys, std::min(all.last, all.first + (part + 1) * part_keys)};
          tasks.push_back({index, request, head, first, count, keys, part, parts});
        }
      }
    }
  }
  return tasks;
}

// The distance at which ALiBi takes least off: scores are kept relative to it, since differences of large numbers that
// are rounded to fp32 would be off by more than all else.
float alibi_base(const Attend& problem, const Request& request, int64_t position, float slope) {
  const KeyRange range = keys_seen(problem, request, position);
  if (range.last <= range.first) return 0;
  const int64_t before = std::abs(range.first - position), behind = std::abs(range.last - 1 - position);
  if (slope < 0) return static_cast<float>(std::max(before, behind));
  const bool is_inside = position >= range.first && position < range.last;
  return is_inside ? 0 : static_cast<float>(std::min(before, behind));
}

// The state of a task's rows: outputs [rows][pitch], largest and sums [rows].
struct State {
  float* outputs;
  float* largest;
  float* sums;
};

class Tile {
 public:
  Tile(const Attend& problem, const TileKernels& kernels, const Task& task, State state)
      : problem_(problem),
        kernels_(kernels),
        task_(task),
        state_(state),
        group_(problem.query.sizes[1] / problem.key_cache.sizes[2]),
        pitch_(padded(problem.query.sizes[2])),
        value_pitch_(padded(problem.value_cache.sizes[3])),
        queries_(static_cast<size_t>(task.rows * pitch_)),
        keys_(static_cast<size_t>(kTileKeys * pitch_)),
        values_(static_cast<size_t>(kTileKeys * value_pitch_)) {}

  void run() {
    load_queries();
    for (int64_t first = task_.keys.first; first < task_.keys.last; first += kTileKeys) step(first);
  }

 private:
  int64_t query_of(int64_t row) const { return (task_.first_row + row) / group_; }
  int64_t head_of(int64_t row) const { return task_.key_head * group_ + (task_.first_row + row) % group_; }

  void load_queries() {
    const void* rows[kTileRows];
    float scales[kTileRows];
    for (int64_t row = 0; row < task_.rows; ++row) {
      const int64_t token = task_.request.first_query + query_of(row);
      const int64_t offset = token * problem_.query.strides[0] + head_of(row) * problem_.query.strides[1];
      rows[row] = problem_.query.as<const char>() + offset * size_of(problem_.query.dtype);
      scales[row] = 1;
      positions_[row] = task_.request.position(query_of(row));
      ranges_[row] = keys_seen(problem_, task_.request, positions_[row]);
      if (!problem_.alibi_slopes.is_present()) continue;
      slopes_[row] = problem_.alibi_slopes.as<const float>()[head_of(row)];
      bases_[row] = alibi_base(problem_, task_.request, positions_[row], slopes_[row]);
    }
    kernels_.copy[type_index(problem_.query.dtype)](
        {rows, scales, task_.rows, problem_.query.sizes[2], pitch_, queries_.data()});
  }

  void step(int64_t first) {
    const int64_t count = std::min(kTileKeys, task_.keys.last - first), page_size = problem_.key_cache.sizes[1];
    const void *keys[kTileKeys] = {}, *values[kTileKeys] = {};
    float key_scales[kTileKeys] = {}, value_scales[kTileKeys] = {};
    bool is_whole = count == kTileKeys;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t page = page_of(problem_, task_.index, first + i), row = (first + i) % page_size;
      is_whole = is_whole && page >= 0;
      if (page < 0) continue;
      keys[i] = row_in(problem_.key_cache, page, row, task_.key_head);
      values[i] = row_in(problem_.value_cache, page, row, task_.key_head);
      key_scales[i] = scale_at(problem_.key_scale, page, row, task_.key_head);
      value_scales[i] = scale_at(problem_.value_scale, page, row, task_.key_head);
    }
    const int type = type_index(problem_.key_cache.dtype);
    kernels_.copy[type]({keys, key_scales, kTileKeys, problem_.key_cache.sizes[3], pitch_, keys_.data()});
    kernels_.copy[type]({values, value_scales, kTileKeys, problem_.value_cache.sizes[3], value_pitch_, values_.data()});
    StepArguments arguments{.queries = queries_.data(),
                            .rows = task_.rows,
                            .keys = keys_.data(),
                            .values = values_.data(),
                            .pitch = pitch_,
                            .value_pitch = value_pitch_,
                            .scale = static_cast<float>(problem_.scale.value_or(
                                1 / std::sqrt(std::max(static_cast<double>(problem_.query.sizes[2]), 1.0)))),
                            .softcap = static_cast<float>(problem_.softcap),
                            .largest = state_.largest,
                            .sums = state_.sums,
                            .outputs = state_.outputs};
    float distances[kTileRows];
    if (problem_.alibi_slopes.is_present()) {
      for (int64_t row = 0; row < task_.rows; ++row) distances[row] = static_cast<float>(first - positions_[row]);
      arguments.slopes = slopes_;
      arguments.distances = distances;
      arguments.bases = bases_;
    }
    uint8_t keeps[kTileRows * kTileKeys];
    if (!is_whole || !all_see(first)) {
      for (int64_t row = 0; row < task_.rows; ++row) {
        for (int64_t i = 0; i < kTileKeys; ++i) keeps[row * kTileKeys + i] = keys[i] != nullptr && sees(row, first + i);
      }
      arguments.keeps = keeps;
    }
    kernels_.step(arguments);
  }

  // Whether every row sees the whole tile: then nothing is hidden.
  bool all_see(int64_t first) const {
    if (problem_.mask.is_present() && first + kTileKeys > task_.request.keys - task_.request.queries) return false;
    for (int64_t row = 0; row < task_.rows; ++row) {
      if (first < ranges_[row].first || first + kTileKeys > ranges_[row].last) return false;
    }
    return true;
  }
  bool sees(int64_t row, int64_t key) const {
    if (key < ranges_[row].first || key >= ranges_[row].last) return false;
    const int64_t new_key = key - (task_.request.keys - task_.request.queries);
    if (!problem_.mask.is_present() || new_key < 0) return true;
    const TensorView& mask = problem_.mask;
    return mask
        .as<const bool>()[task_.index * mask.strides[0] + query_of(row) * mask.strides[1] + new_key * mask.strides[2]];
  }

  const Attend& problem_;
  const TileKernels& kernels_;
  const Task& task_;
  State state_;
  int64_t group_, pitch_, value_pitch_;
  std::vector<float> queries_, keys_, values_;
  int64_t positions_[kTileRows];
  KeyRange ranges_[kTileRows];
  float slopes_[kTileRows], bases_[kTileRows];
};

// Merges the parts of a task's rows and stores them.
void finish(const Attend& problem, const Task& task, const State* parts) {
  const int64_t group = problem.query.sizes[1] / problem.key_cache.sizes[2], columns = problem.value_cache.sizes[3];
  const int64_t pitch = padded(columns), tokens = problem.query.sizes[0];
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t head = task.key_head * group + (task.first_row + row) % group;
    const int64_t token = task.request.first_query + (task.first_row + row) / group;
    const int64_t position = task.request.position((task.first_row + row) / group);
    const float slope = problem.alibi_slopes.is_present() ? problem.alibi_slopes.as<const float>()[head] : 0;
    const float shift = slope * alibi_base(problem, task.request, position, slope);  // of all scores kept so far
    const float sink = problem.sinks.is_present() ? problem.sinks.as<const float>()[head] + shift : kMinusInfinity;
    float largest = sink;
    for (int64_t i = 0; i < task.parts; ++i) largest = std::max(largest, parts[i].largest[row]);
    const bool is_empty = largest == kMinusInfinity;
    float sum = is_empty ? 0 : std::exp(sink - largest);
    std::vector<float> values(static_cast<size_t>(columns));
    for (int64_t i = 0; i < task.parts && !is_empty; ++i) {
      const float weight = std::exp(parts[i].largest[row] - largest);
      if (weight == 0) continue;
      sum += weight * parts[i].sums[row];
      const float* from = parts[i].outputs + row * pitch;
      for (int64_t j = 0; j < columns; ++j) values[static_cast<size_t>(j)] += weight * from[j];
    }
    const float factor = is_empty ? 0 : 1 / sum;
    const int64_t place = token * problem.output.strides[0] + head * problem.output.strides[1];
    for (int64_t j = 0; j < columns; ++j) {
      store_element(problem.output.data, problem.output.dtype, place + j, values[static_cast<size_t>(j)] * factor);
    }
    if (problem.lse.is_present()) {
      problem.lse.as<float>()[head * tokens + token] = is_empty ? kMinusInfinity : largest + std::log(sum) - shift;
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
  const std::vector<Task> tasks = tasks_of(problem);
  const TileKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kTileKernels);
  const int64_t pitch = padded(problem.value_cache.sizes[3]);
  // Parts that are merged later keep their sums; a task alone keeps them until it has stored its rows.
  std::vector<State> states(tasks.size());
  int64_t floats = 0;
  for (const Task& task : tasks) floats += task.parts > 1 ? task.rows * (pitch + 2) : 0;
  auto* memory = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(floats + 16) * sizeof(float)));
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (tasks[i].parts == 1) continue;
    states[i] = {memory, memory + tasks[i].rows * pitch, memory + tasks[i].rows * (pitch + 1)};
    memory += tasks[i].rows * (pitch + 2);
  }
  parallel_for(context.threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[static_cast<size_t>(i)];
    State state = states[static_cast<size_t>(i)];
    std::vector<float> own;
    if (task.parts == 1) {
      own.resize(static_cast<size_t>(task.rows * (pitch + 2)));
      state = {own.data(), own.data() + task.rows * pitch, own.data() + task.rows * (pitch + 1)};
    }
    std::fill_n(state.outputs, task.rows * pitch, 0.0f);
    std::fill_n(state.largest, task.rows, kMinusInfinity);
    std::fill_n(state.sums, task.rows, 0.0f);
    Tile(problem, kernels, task, state).run();
    if (task.parts == 1) finish(problem, task, &state);
  });
  parallel_for(context.threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[static_cast<size_t>(i)];
    if (task.parts > 1 && task.part == 0) finish(problem, task, states.data() + i);
  });
}

uint64_t code_version() {
  return hash_text("paged_attention cpu 2");
}

}  // namespace

constinit const registry::Kernel<Attend> kAttendCpu{
    .name = "cpu", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::paged_attention
