// Jobs of any number of callers stand in one list; whoever is free takes the next worker number of the first one. A
// caller takes numbers of its own job too, so every job ends even if all other threads are busy elsewhere.
#include "kernel_pytorch/device/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cpu/topology.h"

namespace kernel_pytorch::cpu_device {
namespace {

thread_local bool runs_a_job = false;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// condition_variable::wait binds to a libstdc++ newer than manylinux_2_34 promises when g++ 12 compiles it; waiting in
// long slices does not.
template <class Predicate>
void wait_for_good(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, const Predicate& until) {
  while (!condition.wait_for(lock, std::chrono::hours(1), until)) {
  }
}

struct Job {
  void (*work)(void*, int);
  void* state;
  int workers;
  int next;  // guarded by the pool's mutex
  std::atomic<int> unfinished;

  void run_one(int worker) {
    runs_a_job = true;
    work(state, worker);
    runs_a_job = false;
  }
};

class Pool {
 public:
  // `nodes`: CPUs of each NUMA node among which threads are divided; empty where they run anywhere.
  Pool(int width, bool may_spin, std::vector<std::vector<int>> nodes)
      : width_(width), spins_(may_spin ? kSpins : 0), nodes_(std::move(nodes)) {}

  int width() const { return width_; }

  void run(int workers, void (*work)(void*, int), void* state) {
    Job job{work, state, workers, 1, workers};  // number 0 is the caller's
    publish(job);
    for (int worker = 0; worker >= 0; worker = claim_of(job)) {
      job.run_one(worker);
      job.unfinished.fetch_sub(1, std::memory_order_acq_rel);
    }
    wait_until_finished(job);
  }

 private:
  // About 20 microseconds: the gap between two kernels of a model, and short enough not to be seen in a profile.
  static constexpr int kSpins = 400;

  void publish(Job& job) {
    int to_wake;
    {
      const std::lock_guard lock(mutex_);
      if (!started_) start_threads();
      jobs_.push_back(&job);
      jobs_waiting_.store(true, std::memory_order_relaxed);
      to_wake = std::min(job.workers - 1, sleeping_);
    }
    for (int i = 0; i < to_wake; ++i) job_arrived_.notify_one();
  }

  // The next worker number of this job, or -1. A job whose numbers are all taken leaves the list.
  int claim_of(Job& job) {
    const std::lock_guard lock(mutex_);
    if (job.next == job.workers) return -1;
    const int worker = job.next++;
    if (job.next == job.workers) remove(job);
    return worker;
  }

  void remove(Job& job) {
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    jobs_waiting_.store(!jobs_.empty(), std::memory_order_relaxed);
  }

  void wait_until_finished(const Job& job) {
    const auto finished = [&] { return job.unfinished.load(std::memory_order_acquire) == 0; };
    for (int i = 0; i < spins_; ++i) {
      if (finished()) return;
      pause_briefly();
    }
    std::unique_lock lock(mutex_);
    wait_for_good(job_ended_, lock, finished);
  }

  void serve() {
    for (;;) {
      for (int i = 0; i < spins_ && !jobs_waiting_.load(std::memory_order_relaxed); ++i) pause_briefly();
      std::unique_lock lock(mutex_);
      ++sleeping_;
      wait_for_good(job_arrived_, lock, [&] { return !jobs_.empty(); });
      --sleeping_;
      Job& job = *jobs_.front();
      const int worker = job.next++;
      if (job.next == job.workers) remove(job);
      lock.unlock();
      job.run_one(worker);
      // After the last subtraction the caller may return and the job, on its stack, is gone.
      if (job.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        { const std::lock_guard ended(mutex_); }
        job_ended_.notify_all();
      }
    }
  }

  // Signals stay with the application's own threads. A thread that cannot be had only makes jobs slower.
  void start_threads() {
    started_ = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const auto serve_pool = [](void* pool) -> void* {
      static_cast<Pool*>(pool)->serve();
      return nullptr;
    };
    for (int i = 1; i < width_; ++i) {
      pthread_t thread;
      if (pthread_create(&thread, &detached, serve_pool, this) != 0) break;
      if (!nodes_.empty())
        keep_on(thread, nodes_[static_cast<size_t>(i) * nodes_.size() / static_cast<size_t>(width_)]);
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // A thread that cannot be kept there runs anywhere, which is only slower.
  static void keep_on(pthread_t thread, const std::vector<int>& cpus) {
    const int last = *std::max_element(cpus.begin(), cpus.end());
    std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(last + 1) / sizeof(cpu_set_t) + 1);
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    for (int cpu : cpus) CPU_SET_S(cpu, bytes, mask.data());
    pthread_setaffinity_np(thread, bytes, mask.data());
  }

  const int width_;
  const int spins_;
  const std::vector<std::vector<int>> nodes_;
  bool started_ = false;
  int sleeping_ = 0;
  std::deque<Job*> jobs_;
  std::atomic<bool> jobs_waiting_{false};
  std::mutex mutex_;
  std::condition_variable job_arrived_, job_ended_;
};

// The face that contexts keep. The pool behind it is never destroyed, since its threads never end, and is left behind
// in a child of fork(), which has none of the threads and perhaps a locked mutex.
class OwnThreads : public Threads {
 public:
  OwnThreads() {
    pthread_atfork(nullptr, nullptr, [] { pool_.store(nullptr); });
  }

  int count() const override { return pool().width(); }

  void run(int workers, void (*work)(void*, int), void* state) override {
    if (workers <= 1 || runs_a_job) {
      for (int worker = 0; worker < workers; ++worker) work(state, worker);
      return;
    }
    pool().run(workers, work, state);
  }

 private:
  static Pool& pool() {
    if (Pool* known = pool_.load(std::memory_order_acquire)) return *known;
    const Topology machine = read_topology(allowed_cpus());
    const int usual = machine.threads();
    const int width = options().threads > 0 ? options().threads : usual;
    const bool divides = width == machine.cores && machine.nodes.size() > 1;
    Pool* fresh = new Pool(width, width <= usual, divides ? machine.nodes : std::vector<std::vector<int>>());
    Pool* first = nullptr;
    if (pool_.compare_exchange_strong(first, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was faster; no thread of ours was started yet
    return *first;
  }

  static inline std::atomic<Pool*> pool_{nullptr};
};

}  // namespace

Threads& own_threads() {
  static OwnThreads* threads = new OwnThreads;
  return *threads;
}

}  // namespace kernel_pytorch::cpu_device
