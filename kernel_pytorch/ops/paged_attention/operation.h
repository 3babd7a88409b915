// Paged attention as the registry sees it, the kernels that its lists name, and how problems are read on a CPU.
#pragma once

#include <algorithm>

#include "kernel_pytorch/ops/paged_attention/paged_attention.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::paged_attention {

void check(Attend& problem, Device device);
void check(Append& problem, Device device);

extern const registry::Operation<Attend> kAttend;
extern const registry::Operation<Append> kAppend;
extern const registry::Kernel<Attend> kAttendSm90, kAttendCuda, kAttendCudaRows, kAttendCpu, kAttendReference;
extern const registry::Kernel<Append> kAppendCuda, kAppendCpu, kAppendReference;

// The slot of a token; on the CPU, where one outside the cache is an error.
int64_t checked_slot(const Append& problem, int64_t token);

// How keys are turned: pairs of a head's columns, 0 where they are not, and elements of a table from one to the next.
struct Rotation {
  int64_t pairs = 0, step = 1;
};
Rotation rotation_of(const Append& problem);
void check_rotation(const Append& problem, Device device);
// The row of cos and sin for a token; on the CPU, where a position outside the tables is an error.
int64_t checked_row(const Append& problem, int64_t token);

// A request's tokens and keys; on the CPU, where offsets and lengths can be read.
struct Request {
  int64_t first_query = 0, queries = 0, keys = 0;

  int64_t position(int64_t query) const { return keys - queries + query; }
};
Request request_at(const Attend& problem, int64_t index);

// The keys that the query at a position can see by causal and window alone.
struct KeyRange {
  int64_t first = 0, last = 0;
};
KeyRange keys_seen(const Attend& problem, const Request& request, int64_t position);

// What a plan must look like (plan/plan.cpp).
void check_plan(const Attend& problem, Device device);

// The page of a key, or -1.
int64_t page_of(const Attend& problem, int64_t request, int64_t key);

// Strides of a scale by page, row and head: zeros where all share one.
struct ScaleStrides {
  int64_t page = 0, row = 0, head = 0;
};
ScaleStrides scale_strides(const TensorView& scale);
inline float scale_at(const TensorView& scale, int64_t page, int64_t row, int64_t head) {
  if (!scale.is_present()) return 1;
  const ScaleStrides strides = scale_strides(scale);
  return scale.as<const float>()[page * strides.page + row * strides.row + head * strides.head];
}

}  // namespace kernel_pytorch::paged_attention
