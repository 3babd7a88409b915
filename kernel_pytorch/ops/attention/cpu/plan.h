// How the CPU kernels see a problem: sequences (of a batch, or packed), the rules of each head, blocks of queries and
// the spans of keys that they may see. Host code, the same for every instruction level.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/attention/cpu/kernels.h"
#include "kernel_pytorch/ops/attention/sequences.h"

namespace kernel_pytorch::attention {

class CpuPlan {
 public:
  CpuPlan(const TensorView& query, const TensorView& key, const TensorView& value, const Scoring& scoring,
          int64_t query_tile, const TilePrograms* programs);

  const std::vector<Sequence>& sequences() const { return sequences_; }
  int64_t heads() const { return query_.sizes[1]; }
  int64_t key_heads() const { return key_.sizes[1]; }
  int64_t group() const { return key_heads() == 0 ? 1 : heads() / key_heads(); }
  // Queries and keys from here on belong to no sequence.
  int64_t queries_end() const { return queries_end_; }
  int64_t keys_end() const { return keys_end_; }

  ScoreRules rules_of(const Sequence& sequence, int64_t head) const;
  // Blocks of queries, each inside one row of the block list. A block may have no rows.
  int64_t query_blocks(const Sequence& sequence) const;
  struct QueryBlock {
    int64_t first = 0, rows = 0;
  };
  QueryBlock query_block(const Sequence& sequence, int64_t block) const;
  // Ascending and apart from each other.
  void find_spans(const Sequence& sequence, int64_t head, int64_t first_query, std::vector<KeySpan>& spans) const;
  // How many scores a sequence has, for sorting.
  int64_t work_of(const Sequence& sequence) const { return sequence.queries * (sequence.keys + 1); }

 private:
  // Query tiles per row of a sequence's block list; only the last row may have fewer.
  int64_t blocks_per_row(const Sequence& sequence) const;

  const TensorView &query_, &key_, &value_;
  const Scoring& scoring_;
  std::vector<Sequence> sequences_;
  int64_t query_tile_;
  const TilePrograms* programs_;  // null: none
  int64_t queries_end_ = 0, keys_end_ = 0;
};

// Rows of one head of a [batch, heads, rows, size] tensor, from a sequence's first on.
HeadRows head_rows(const TensorView& view, int64_t batch, int64_t head, int64_t first_row);

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}
inline float* allocate_floats(Context& context, int64_t count) {
  return count == 0 ? nullptr
                    : static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(float)));
}
// The range that contains a number, among consecutive ranges given by their first members; empty ranges are skipped.
template <class Range>
const Range& find_range(std::span<const Range> ranges, int64_t Range::*first, int64_t number) {
  return *(std::ranges::upper_bound(ranges, number, {}, first) - 1);
}

// Runs tasks on all threads, each with a buffer of its own: body(task, buffer).
template <class Body>
void for_tasks(Context& context, int64_t tasks, float* buffers, int64_t buffer_floats, const Body& body) {
  const int64_t workers = context.threads == nullptr ? 1 : context.threads->count();
  TaskQueue queue(tasks);
  parallel_for(context.threads, std::min(workers, tasks), [&](int64_t worker) {
    for (int64_t task; (task = queue.take()) >= 0;) {
      body(task, buffers + worker * buffer_floats);
    }
  });
}

// Why a problem is not for the tiles of AMX; null where it is.
const char* amx_obstacle(const TensorView& query, const DeviceInfo& device);

// The table of this machine's instruction level, without AMX.
const TileKernels& tile_kernels(const DeviceInfo& device);
// Those of bf16 with AMX; only where amx_obstacle is null.
const TileKernels& amx_kernels();

// With any table: the kernels of the registry, and tests of those that this machine cannot run.
void run_forward(const ForwardProblem& problem, const TileKernels& kernels, Context& context);
void run_backward(const BackwardProblem& problem, const TileKernels& kernels, Context& context);

}  // namespace kernel_pytorch::attention
