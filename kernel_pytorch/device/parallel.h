// parallel_for: tasks handed out one by one (task_queue.h). Exceptions of a task are carried to the caller; the
// remaining tasks are dropped.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/task_queue.h"

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
    TaskQueue queue;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } shared{task, TaskQueue(tasks)};
  threads->run(
      workers,
      [](void* state, int) {
        Shared& shared = *static_cast<Shared*>(state);
        try {
          for (int64_t i; (i = shared.queue.take()) >= 0;) shared.task(i);
        } catch (...) {  // carried across the threads, rethrown below
          if (!shared.failed.exchange(true)) shared.error = std::current_exception();
          shared.queue.drop();
        }
      },
      &shared);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace kernel_pytorch
