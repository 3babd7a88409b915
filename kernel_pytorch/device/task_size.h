// How many rows a thread takes at a time, where it asks for its next row while it works on one: the first row of a task
// comes cold, so tasks are as long as leaves each thread enough of them to share the work evenly.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch {

inline int64_t rows_per_task(int64_t rows, int64_t row_bytes, const Threads* threads) {
  constexpr int64_t kLeastBytes = 128 << 10;  // long enough to hide the atomic
  constexpr int64_t kMostBytes = 512 << 10;   // one cold row in 32 of 16 KiB
  constexpr int64_t kTasksEach = 8;
  const int64_t workers = threads == nullptr ? 1 : threads->count();
  const int64_t bytes = std::clamp<int64_t>(rows * row_bytes / (workers * kTasksEach), kLeastBytes, kMostBytes);
  return std::clamp<int64_t>(bytes / std::max<int64_t>(row_bytes, 1), 1, std::max<int64_t>(rows, 1));
}

}  // namespace kernel_pytorch
