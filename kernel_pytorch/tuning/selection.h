// The seven tiers that choose a kernel and its config. An op call goes through registry/choose.h; this is what it asks.
//
//   Override    Context::kernel_override, for one call
//   Overlay     pushed for a scope, process-wide (a CUDA backward runs on autograd's own threads)
//   Memory      measured in this process
//   Persistent  measured before, read from the store once per process
//   Autotune    measured now, where it was asked for; the only tier that writes (besides `kpt cache import`)
//   Heuristic   the first kernel of the list that supports the problem, with the config it proposes
//   Error       nothing supports the problem: every kernel's reason is in the message
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/tuning/key.h"

namespace kernel_pytorch::tuning {

enum class Tier : uint8_t { kOverride, kOverlay, kMemory, kPersistent, kAutotune, kHeuristic, kError };
KP_EXPORT std::string_view name_of(Tier tier);

struct Measurement {
  std::string kernel;
  std::string config;
  double median_us = 0;
  double spread_us = 0;  // half the distance between the quartiles
  std::string date;      // UTC, ISO 8601
  std::string library_version;
};

struct Remembered {
  Measurement measurement;
  Tier tier = Tier::kMemory;  // kMemory: measured in this process; kPersistent: read from the store
};

// False while no overlay, measurement or autotune request exists in the process: the warm call's one check. The first
// call of a process reads the store (at most 100 ms; longer and the process goes on without it, said once).
KP_EXPORT bool anything_to_consult();
// Grows with every change that could alter a choice (overlay, measurement, autotune scope), so that a resolved choice
// can be kept for as long as the number stands.
KP_EXPORT uint64_t selection_generation();

struct OverlayEntry {
  std::string op;
  std::string problem;  // the key's text; empty: every problem of the op
  std::string kernel;
  std::string config;  // empty: the kernel's own heuristic
  std::string device;  // its fingerprint; empty: every device
};
// Entries of a later push win. Returns a handle for pop; pops may come in any order.
KP_EXPORT int64_t push_overlay(std::vector<OverlayEntry> entries);
KP_EXPORT void pop_overlay(int64_t handle);
KP_EXPORT std::optional<OverlayEntry> find_overlay(std::string_view op, const Key& key);

// Tiers 3 and 4. Thread-safe. `remember` writes to memory and, where it can, to the store.
KP_EXPORT std::optional<Remembered> find_measured(const Key& key);
KP_EXPORT void remember(const Key& key, const Measurement& measurement);
KP_EXPORT void forget_memory();  // drops tiers 3 and 4 from memory; the next call reads the store again

// Tier 5 is on for the process (Options::autotune, looked at when the store is read) or inside an autotune scope
// (tuning/autotune_scope.h).
KP_EXPORT bool autotune_enabled();

// What was decided, newest last, while recording is on; each distinct decision once with its count.
struct Decision {
  Key key;
  std::string kernel;
  std::string config;
  Tier tier = Tier::kHeuristic;
  int64_t candidates = 0;  // kernels and configs that tuning would measure
  int64_t bytes = 0;       // least work of one call
  int64_t flops = 0;
  int64_t count = 0;
};
KP_EXPORT void set_recording(bool on);  // turning on clears what was there
KP_EXPORT bool recording();
KP_EXPORT void record(Decision decision);  // its count is of no account
KP_EXPORT std::vector<Decision> recorded();

}  // namespace kernel_pytorch::tuning
