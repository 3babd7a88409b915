// Rules and storages of an optimizer step, for host and device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

#ifdef __CUDACC_RTC__
#define KP_STEP_CODE __device__ __forceinline__
#else
#define KP_STEP_CODE [[gnu::always_inline, maybe_unused]] static inline
#endif

namespace kernel_pytorch::optimizer_step {

enum class Rule : uint8_t { kAdamW, kLion, kSgd };
enum class Storage : uint8_t { kPlain, kCompanded, kDynamic };
inline constexpr int kRules = 3, kStorages = 3;

// Elements that share a scale.
constexpr int group_elements(Storage storage) {
  return storage == Storage::kCompanded ? 64 : storage == Storage::kDynamic ? 256 : 1;
}

}  // namespace kernel_pytorch::optimizer_step
