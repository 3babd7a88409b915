// parallel_for_stretches: as parallel_for, for tasks that read and write memory one after the other. Each worker has a
// stretch of them, whose streams the hardware goes on fetching from one task to the next, and helps others when it has
// ended. Exceptions of a task are carried to the caller; the remaining tasks are dropped.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch {

template <class Task>
void parallel_for_stretches(Threads* threads, int64_t tasks, const Task& task) {
  const int workers = threads == nullptr ? 1 : static_cast<int>(std::min<int64_t>(threads->count(), tasks));
  if (workers <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  struct Shared {
    const Task& task;
    std::vector<Stretch> stretches;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } shared{task, std::vector<Stretch>(workers)};
  for (int worker = 0; worker < workers; ++worker) {
    shared.stretches[worker].next.store(tasks * worker / workers, std::memory_order_relaxed);
    shared.stretches[worker].end = tasks * (worker + 1) / workers;
  }
  threads->run(
      workers,
      [](void* state, int worker) {
        Shared& shared = *static_cast<Shared*>(state);
        const size_t count = shared.stretches.size();
        try {
          for (size_t i = 0; i < count; ++i) {
            Stretch& stretch = shared.stretches[(worker + i) % count];
            for (int64_t taken; (taken = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) {
              shared.task(taken);
            }
          }
        } catch (...) {  // carried across the threads, rethrown below
          if (!shared.failed.exchange(true)) shared.error = std::current_exception();
          for (Stretch& stretch : shared.stretches) stretch.next.store(stretch.end, std::memory_order_relaxed);
        }
      },
      &shared);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace kernel_pytorch
