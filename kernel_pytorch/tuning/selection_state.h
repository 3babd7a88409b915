// What the files of tuning share: the flags behind anything_to_consult, the measurements in memory, and the lock over
// both. Never destroyed, since a late reader of the store may outlive main(). Survives fork(): see selection_state.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string_view>
#include <vector>

#include "kernel_pytorch/tuning/key.h"
#include "kernel_pytorch/tuning/selection.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::tuning {

enum ConsultFlag : uint32_t {
  kStoreUnread = 1,
  kHasOverlay = 2,
  kHasMeasurement = 4,
  kAutotuning = 8,
  kRecording = 16,
};

struct Overlay {
  int64_t handle = 0;
  std::vector<OverlayEntry> entries;
};

class AutotuneScope;

struct SelectionState {
  std::shared_mutex mutex;  // over everything here, and for writing the two atomics below
  std::vector<Overlay> overlays;
  int64_t next_handle = 1;  // of overlays and autotune scopes
  std::map<Key, Remembered> measured;
  uint64_t reading = 0;        // number of the reading of the store that is wanted; an overtaken one is dropped
  int64_t reader_process = 0;  // 0: not begun; a child of fork() has no reader and begins its own
  std::string write_failure_path, write_failure;  // why the last measurement could not be written, and where to
  std::vector<std::shared_ptr<AutotuneScope>> autotune_scopes;
  std::shared_ptr<AutotuneScope> option_scope;  // of autotune_option, made when it is needed
  bool autotune_option = false;
  std::vector<Decision> decisions;
  std::map<std::string, size_t, std::less<>> decision_index;

  // Call with the lock held exclusively: sets the flags to what the members say and starts a new generation.
  void publish();
};

SelectionState& selection_state();

// Apart from the state, so that a warm call is one load with no guard of a static around it.
extern std::atomic<uint32_t> consult_flags;
extern std::atomic<uint64_t> generation;

// How long the first call of a process waits for the store; tests on an emulated processor wait longer.
extern std::atomic<int> store_read_limit_ms;

// Adds rows of the store to tier 4; what this process measured itself stays in front of them.
void merge_stored_locked(SelectionState& state, const std::vector<StoredMeasurement>& rows);
// Drops what is in memory for an op (empty: every op).
void forget_measured(std::string_view op);

// Starts reading the store if that has not begun, and waits for it for at most store_read_limit_ms.
void read_store_once();

}  // namespace kernel_pytorch::tuning
