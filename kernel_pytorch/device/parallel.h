// parallel_for: tasks handed out one by one from an atomic counter, so that fast threads take more. Exceptions of a
// task are carried to the caller; the remaining tasks are dropped.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch {

template <class Task>
void parallel_for(Threads* threads, int64_t tasks, const Task& task) {
  const int workers = threads == nullptr ? 1 : static_cast<int>(std::min<int64_t>(threads->count(), tasks));
  if (workers <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  struct Shared {
    const Task& task;
    const int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } shared{task, tasks};
  threads->run(
      workers,
      [](void* state, int) {
        Shared& shared = *static_cast<Shared*>(state);
        try {
          for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.tasks;) shared.task(i);
        } catch (...) {  // carried across the threads, rethrown below
          if (!shared.failed.exchange(true)) shared.error = std::current_exception();
          shared.next.store(shared.tasks, std::memory_order_relaxed);
        }
      },
      &shared);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace kernel_pytorch
