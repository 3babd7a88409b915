// Resolved choices of this process, so that a warm call with something measured compares no text. A fixed table of two
// words per slot, read and written without a lock: a slot that another thread is half-way through writing does not
// match any key (the first word is the key xor the second), so it reads as a miss.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "kernel_pytorch/registry/slow_path.h"

namespace kernel_pytorch::registry {

class DecisionCache {
 public:
  std::optional<Selected> find(uint64_t key) const {
    const Slot& slot = slots_[key % kSlots];
    const uint64_t value = slot.value.load(std::memory_order_relaxed);
    if ((slot.check.load(std::memory_order_relaxed) ^ value) != key || (value & kUsed) == 0) return std::nullopt;
    return Selected{static_cast<int>(value >> 8 & 0xffff), static_cast<int>(value >> 24 & 0xffffffff),
                    static_cast<tuning::Tier>(value & 0x7f)};
  }
  void keep(uint64_t key, const Selected& selected) {
    const uint64_t value = kUsed | static_cast<uint64_t>(selected.tier) | static_cast<uint64_t>(selected.kernel) << 8 |
                           static_cast<uint64_t>(selected.config) << 24;
    Slot& slot = slots_[key % kSlots];
    slot.value.store(value, std::memory_order_relaxed);
    slot.check.store(key ^ value, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kSlots = 4096;
  static constexpr uint64_t kUsed = 0x80;
  struct Slot {
    std::atomic<uint64_t> check{0};
    std::atomic<uint64_t> value{0};
  };
  std::array<Slot, kSlots> slots_{};
};

}  // namespace kernel_pytorch::registry
