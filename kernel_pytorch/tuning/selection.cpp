#include "kernel_pytorch/tuning/selection.h"

#include <algorithm>
#include <mutex>

#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/tuning/selection_state.h"
#include "kernel_pytorch/tuning/store_file.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr size_t kMostDecisions = 65536;  // distinct ones; a program that passes this has unbounded shapes

}  // namespace

std::string_view name_of(Tier tier) {
  constexpr std::string_view kNames[] = {"override", "overlay",   "memory", "persistent",
                                         "autotune", "heuristic", "error"};
  return kNames[static_cast<int>(tier)];
}

bool anything_to_consult() {
  const uint32_t now = consult_flags.load(std::memory_order_acquire);
  if (now == 0) [[likely]]
    return false;
  if ((now & kStoreUnread) == 0) return true;
  read_store_once();
  return consult_flags.load(std::memory_order_acquire) != 0;
}

uint64_t selection_generation() {
  return generation.load(std::memory_order_acquire);
}

int64_t push_overlay(std::vector<OverlayEntry> entries) {
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  const int64_t handle = state.next_handle++;
  state.overlays.push_back({handle, std::move(entries)});
  state.publish();
  return handle;
}

void pop_overlay(int64_t handle) {
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  const size_t removed =
      std::erase_if(state.overlays, [&](const Overlay& overlay) { return overlay.handle == handle; });
  KP_CHECK(removed == 1, "tuning: no overlay has the handle ", handle, "; pop each pushed overlay once");
  state.publish();
}

std::optional<OverlayEntry> find_overlay(std::string_view op, const Key& key) {
  SelectionState& state = selection_state();
  const std::shared_lock lock(state.mutex);
  for (auto overlay = state.overlays.rbegin(); overlay != state.overlays.rend(); ++overlay) {
    const OverlayEntry* for_every_problem = nullptr;
    for (const OverlayEntry& entry : overlay->entries) {
      if (entry.op != op || (!entry.device.empty() && entry.device != key.device)) continue;
      if (entry.problem == key.problem) return entry;
      if (entry.problem.empty()) for_every_problem = &entry;
    }
    if (for_every_problem != nullptr) return *for_every_problem;
  }
  return std::nullopt;
}

std::optional<Remembered> find_measured(const Key& key) {
  SelectionState& state = selection_state();
  if (consult_flags.load(std::memory_order_acquire) & kStoreUnread) read_store_once();
  const std::shared_lock lock(state.mutex);
  const auto found = state.measured.find(key);
  if (found == state.measured.end()) return std::nullopt;
  return found->second;
}

void remember(const Key& key, const Measurement& measurement) {
  SelectionState& state = selection_state();
  {
    const std::unique_lock lock(state.mutex);
    state.measured.insert_or_assign(key, Remembered{measurement, Tier::kMemory});
    state.publish();
  }
  write_measurement({key, measurement});
}

void forget_memory() {
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  state.measured.clear();
  ++state.reading;
  state.reader_process = 0;
  consult_flags.fetch_or(kStoreUnread);
  state.publish();
}

void forget_measured(std::string_view op) {
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  std::erase_if(state.measured, [&](const auto& entry) { return op.empty() || entry.first.op == op; });
  state.publish();
}

bool autotune_enabled() {
  return consult_flags.load(std::memory_order_acquire) & kAutotuning;
}

void set_recording(bool on) {
  SelectionState& state = selection_state();
  const std::unique_lock lock(state.mutex);
  if (on) {
    state.decisions.clear();
    state.decision_index.clear();
    consult_flags.fetch_or(kRecording);
  } else {
    consult_flags.fetch_and(~uint32_t{kRecording});
  }
}

bool recording() {
  return consult_flags.load(std::memory_order_acquire) & kRecording;
}

void record(Decision decision) {
  SelectionState& state = selection_state();
  std::string identity;
  const Key& key = decision.key;
  for (const std::string_view part :
       {std::string_view(key.device), std::string_view(key.op), std::string_view(key.kernel_set),
        std::string_view(key.problem), std::string_view(decision.kernel), std::string_view(decision.config),
        name_of(decision.tier)}) {
    identity.append(part).push_back('\0');
  }
  const std::unique_lock lock(state.mutex);
  if ((consult_flags.load() & kRecording) == 0) return;
  const auto found = state.decision_index.find(identity);
  if (found != state.decision_index.end()) {
    ++state.decisions[found->second].count;
    return;
  }
  if (state.decisions.size() >= kMostDecisions) {
    log_once(LogLevel::kWarning, "tuning decisions full",
             concat("tuning: ", kMostDecisions, " distinct decisions recorded; further ones are not kept"));
    return;
  }
  state.decision_index.emplace(std::move(identity), state.decisions.size());
  decision.count = 1;
  state.decisions.push_back(std::move(decision));
}

std::vector<Decision> recorded() {
  SelectionState& state = selection_state();
  const std::shared_lock lock(state.mutex);
  return state.decisions;
}

}  // namespace kernel_pytorch::tuning
