// fork() copies a lock and what it guards as they stand, so the handlers below take the lock around every fork: the
// child always finds both whole. The reader of the store is a thread of its own, so that a hung file system costs an op
// call 100 ms once and nothing more; the wait polls, since a condition variable does not survive a fork with waiters.
#include "kernel_pytorch/tuning/selection_state.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/tuning/store_file.h"

namespace kernel_pytorch::tuning {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::microseconds(50);

std::atomic<uint64_t> readings_done{0};  // the highest number of a reading that has ended

void lock_state_before_fork() {
  selection_state().mutex.lock();
}
void unlock_state_in_parent() {
  selection_state().mutex.unlock();
}
// A read-write lock knows its writer by thread id, and the child's thread has another one: begin the lock anew.
void renew_state_in_child() {
  new (&selection_state().mutex) std::shared_mutex;
}

void end_reading(uint64_t reading) {
  uint64_t done = readings_done.load();
  while (done < reading && !readings_done.compare_exchange_weak(done, reading)) {
  }
}

void read_store_in_background(uint64_t reading) {
  const std::vector<StoredMeasurement> rows = load_store_for_selection();
  SelectionState& state = selection_state();
  {
    const std::unique_lock lock(state.mutex);
    if (state.reading == reading) merge_stored_locked(state, rows);
  }
  end_reading(reading);
}

// The first of several first calls starts the thread; returns the number of the reading to wait for, 0 for none.
uint64_t start_reading(SelectionState& state) {
  const std::unique_lock lock(state.mutex);
  if ((consult_flags.load() & kStoreUnread) == 0) return 0;
  if (state.reader_process == getpid()) return state.reading;
  state.reader_process = getpid();
  state.autotune_option = options().autotune;
  const uint64_t reading = ++state.reading;
  try {
    std::thread(read_store_in_background, reading).detach();
  } catch (const std::system_error& error) {  // no thread to be had: the store is a cache, the call goes on without it
    log_once(LogLevel::kWarning, "tuning store thread",
             concat("tuning: no thread to read the store with (", error.what(), "); going on without it"));
    end_reading(reading);
  }
  return reading;
}

void wait_for_reading(uint64_t reading) {
  const int limit = store_read_limit_ms;
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit);
  while (readings_done.load(std::memory_order_acquire) < reading) {
    if (Clock::now() > deadline) {
      log_once(LogLevel::kWarning, "tuning store slow",
               concat("tuning: reading ", store_path(), " takes longer than ", limit,
                      " ms; going on without it until it arrives"));
      return;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace

constinit std::atomic<uint32_t> consult_flags{kStoreUnread};
constinit std::atomic<uint64_t> generation{1};
constinit std::atomic<int> store_read_limit_ms{100};

SelectionState& selection_state() {
  static SelectionState* state = [] {
    auto* made = new SelectionState;
    pthread_atfork(lock_state_before_fork, unlock_state_in_parent, renew_state_in_child);
    return made;
  }();
  return *state;
}

void SelectionState::publish() {
  uint32_t flags = consult_flags.load() & (kStoreUnread | kRecording);
  if (!overlays.empty()) flags |= kHasOverlay;
  if (!measured.empty()) flags |= kHasMeasurement;
  if (!autotune_scopes.empty() || autotune_option) flags |= kAutotuning;
  consult_flags.store(flags, std::memory_order_release);
  generation.fetch_add(1, std::memory_order_release);
}

void merge_stored_locked(SelectionState& state, const std::vector<StoredMeasurement>& rows) {
  for (const StoredMeasurement& row : rows) {
    const auto [entry, is_new] = state.measured.try_emplace(row.key, Remembered{row.measurement, Tier::kPersistent});
    if (!is_new && entry->second.tier == Tier::kPersistent) entry->second.measurement = row.measurement;
  }
  state.publish();
}

void read_store_once() {
  SelectionState& state = selection_state();
  const uint64_t reading = start_reading(state);
  if (reading == 0) return;
  wait_for_reading(reading);
  const std::unique_lock lock(state.mutex);
  if (state.reading != reading || (consult_flags.load() & kStoreUnread) == 0) return;
  consult_flags.fetch_and(~uint32_t{kStoreUnread});
  state.publish();
}

}  // namespace kernel_pytorch::tuning
