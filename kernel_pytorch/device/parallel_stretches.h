// parallel_for_stretches: as parallel_for, for tasks that read and write memory one after the other. Each thread has a
// stretch of them, whose streams the hardware goes on fetching from one task to the next, and helps others when it has
// ended.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernel_pytorch/device/parallel.h"

namespace kernel_pytorch {

template <class Task>
void parallel_for_stretches(Threads* threads, int64_t tasks, const Task& task) {
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  const int64_t count = std::min<int64_t>(threads == nullptr ? 1 : threads->count(), tasks);
  std::vector<Stretch> stretches(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    stretches[i].next.store(tasks * i / count, std::memory_order_relaxed);
    stretches[i].end = tasks * (i + 1) / count;
  }
  parallel_for(threads, count, [&](int64_t own) {
    for (int64_t i = 0; i < count; ++i) {
      Stretch& stretch = stretches[(own + i) % count];
      for (int64_t taken; (taken = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) task(taken);
    }
  });
}

}  // namespace kernel_pytorch
