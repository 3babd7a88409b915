// XLA's threads of the CPU client, which spin and wait like ours would: kernels run on them, so that there is one pool.
//
// The caller may be one of these threads, and all others may wait for calls like this one. So the caller never depends
// on a task that has not begun: it takes worker numbers itself until none is left, and waits only for those taken. A
// task that comes later finds no number; it owns a share of the job, which the caller may have left long ago.
#pragma once

#include <atomic>
#include <memory>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "xla/ffi/api/ffi.h"

namespace kernel_pytorch::jax_ops {

class XlaThreads {
 public:
  explicit XlaThreads(xla::ffi::ThreadPool& pool)
      : pool_(pool), threads_{static_cast<int32_t>(pool.num_threads()), run, this} {}
  // Null where XLA has no threads to give.
  const kp_threads* threads() const { return threads_.count > 0 ? &threads_ : nullptr; }

 private:
  struct Job {
    void (*work)(void*, int);
    void* state;
    const int workers;
    std::atomic<int> next{0};
    std::atomic<int> unfinished;

    void take_workers() {
      for (int worker; (worker = next.fetch_add(1, std::memory_order_relaxed)) < workers;) {
        runs_a_job = true;
        work(state, worker);
        runs_a_job = false;
        if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished.notify_one();
      }
    }
    void wait() const {
      for (int left; (left = unfinished.load(std::memory_order_acquire)) != 0;) unfinished.wait(left);
    }
  };

  static void run(void* self, int32_t workers, void (*work)(void*, int), void* state) {
    if (workers <= 1 || runs_a_job) {
      for (int worker = 0; worker < workers; ++worker) work(state, worker);
      return;
    }
    const auto job = std::shared_ptr<Job>(new Job{work, state, workers, 0, workers});
    auto& pool = static_cast<XlaThreads*>(self)->pool_;
    for (int i = 1; i < workers; ++i) pool.Schedule([job] { job->take_workers(); });
    job->take_workers();
    job->wait();
  }

  static inline thread_local bool runs_a_job = false;
  xla::ffi::ThreadPool& pool_;
  kp_threads threads_;
};

}  // namespace kernel_pytorch::jax_ops
