// How paged attention on the CPU is cut into tasks. A task is a request, key heads next to each other, up to 64 rows
// (queries times the heads that share keys, of all its key heads) and, of few rows, 1024 keys or as many as a plan
// says: without a plan that fills the machine a request is cut as it alone demands, so its bits do not depend on
// others. Heads of a key lie next to each other in most caches: a task that takes them together reads memory in runs. A
// head's bits do not depend on which others its task has.
#pragma once

#include <vector>

#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"

namespace kernel_pytorch::paged_attention {

struct Task {
  int64_t index;  // of the request
  Request request;
  int64_t first_head, heads;  // key heads
  int64_t first_row, rows;    // of each key head; a row is query * group + head of the group
  KeyRange keys;
  int64_t part, parts;  // parts of these rows are tasks in a row

  // Rows as the kernels of tile.h like them: those behind `rows` are computed and dropped.
  int64_t padded_rows() const { return padded_rows(rows); }
  static int64_t padded_rows(int64_t rows) {
    if (rows <= 2) return rows;
    return rows > 4 && rows <= 8 ? 8 : (rows + 3) / 4 * 4;
  }
};

// Of the requests that are not done.
std::vector<Task> tasks_of(const Attend& problem, const std::vector<bool>& are_done, int64_t threads);

}  // namespace kernel_pytorch::paged_attention
