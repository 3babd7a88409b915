#include "kernel_pytorch/ops/paged_attention/cpu/tasks.h"

#include <algorithm>

#include "kernel_pytorch/ops/paged_attention/plan/operation.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr int64_t kPartKeys = 1024;
constexpr int64_t kTasksPerThread = 4;

int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

// Rows of keys that one task takes, in parts.
struct Rows {
  int64_t index;
  Request request;
  int64_t first_row, rows;
  KeyRange keys;
  int64_t parts, first_part;  // where the first one would begin
  int64_t most_heads;
};

std::vector<Rows> rows_of(const Attend& problem, const std::vector<bool>& are_done) {
  std::vector<Rows> all;
  const int64_t key_heads = problem.key_cache.sizes[2];
  const int64_t group = problem.query.sizes[1] / std::max<int64_t>(key_heads, 1);
  const int64_t part_keys = planned_keys(problem, kPartKeys);
  // Where a head's keys lie next to each other, heads together would leave them.
  const bool has_heads_first = problem.key_cache.strides[2] > problem.key_cache.strides[1];
  for (int64_t index = 0; index < problem.seq_lens.sizes[0]; ++index) {
    if (are_done[static_cast<size_t>(index)]) continue;
    const Request request = request_at(problem, index);
    const int64_t rows = request.queries * group;
    for (int64_t first = 0; first < rows; first += kTileRows) {
      const int64_t count = std::min(kTileRows, rows - first);
      const KeyRange oldest = keys_seen(problem, request, request.position(first / group));
      const KeyRange newest = keys_seen(problem, request, request.position((first + count - 1) / group));
      KeyRange keys{oldest.first, std::max(oldest.last, newest.last)};
      int64_t first_part = keys.first;
      if (problem.batch_invariant) {
        // Cut at the same keys whatever rows stand together, so that a row's bits do not depend on them.
        keys.first = keys.first / kTileKeys * kTileKeys;
        first_part = keys.first / part_keys * part_keys;
      }
      const bool is_whole = rows > kTileRows && !problem.batch_invariant;
      const int64_t parts = is_whole ? 1 : std::max<int64_t>(divide_up(keys.last - first_part, part_keys), 1);
      const int64_t most_heads = has_heads_first ? 1 : std::min(key_heads, kTileRows / Task::padded_rows(count));
      all.push_back({index, request, first, count, keys, parts, first_part, most_heads});
    }
  }
  return all;
}

}  // namespace

std::vector<Task> tasks_of(const Attend& problem, const std::vector<bool>& are_done, int64_t threads) {
  const std::vector<Rows> all = rows_of(problem, are_done);
  const int64_t key_heads = problem.key_cache.sizes[2];
  // As many heads a task as leave every thread some tasks.
  const auto heads_of = [&](const Rows& rows, int64_t most) { return std::min(rows.most_heads, most); };
  int64_t most = kTileRows;
  for (; most > 1; most /= 2) {
    int64_t tasks = 0;
    for (const Rows& rows : all) tasks += rows.parts * divide_up(key_heads, heads_of(rows, most));
    if (tasks >= kTasksPerThread * threads) break;
  }
  std::vector<Task> tasks;
  for (const Rows& rows : all) {
    const int64_t step = heads_of(rows, most), part_keys = rows.parts > 1 ? planned_keys(problem, kPartKeys) : 0;
    for (int64_t head = 0; head < key_heads; head += step) {
      for (int64_t part = 0; part < rows.parts; ++part) {
        KeyRange keys = rows.keys;
        if (rows.parts > 1) {
          const int64_t first = rows.first_part + part * part_keys;
          keys = {std::max(keys.first, first), std::min(keys.last, first + part_keys)};
        }
        tasks.push_back({rows.index, rows.request, head, std::min(step, key_heads - head), rows.first_row, rows.rows,
                         keys, part, rows.parts});
      }
    }
  }
  return tasks;
}

}  // namespace kernel_pytorch::paged_attention
