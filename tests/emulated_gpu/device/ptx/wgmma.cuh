// wgmma, emulated: runtime/wgmma.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

enum class WgmmaType { kBf16, kF16, kE4M3, kE5M2, kTf32 };  // in the order of EmulatedType

inline void wgmma_fence() {
  emulated_wgmma_fence();
}
inline void wgmma_commit_group() {
  emulated_wgmma_commit();
}
template <int kPending>
inline void wgmma_wait_group() {
  emulated_wgmma_wait(kPending);
}
template <int kCount>
inline void tie_registers(float (&)[kCount]) {}
template <int kCount>
inline void tie_registers(uint32_t (&)[kCount]) {}

inline constexpr uint32_t kDescriptorHighWord = 0x40000040u;
inline constexpr uint32_t kShortDescriptorHighWord = 0x80000020u;

inline uint64_t emulated_descriptor(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

template <int kColumns, WgmmaType kType, WgmmaType kTypeB = kType>
struct Wgmma {
  static_assert(kColumns % 8 == 0 && kColumns <= 256);
  static constexpr int kCount = kColumns / 2;
  template <int kTransposeA, int kTransposeB, int kStepA, int kStepB>
  static void ss(float (&d)[kCount], uint32_t a, uint32_t b, int accumulate) {
    const EmulatedWgmma product = {d,
                                   nullptr,
                                   emulated_descriptor(a + kStepA, kDescriptorHighWord),
                                   emulated_descriptor(b + kStepB, kDescriptorHighWord),
                                   kColumns,
                                   static_cast<int>(kType),
                                   static_cast<int>(kTypeB),
                                   kTransposeA,
                                   kTransposeB,
                                   accumulate,
                                   -1,
                                   0};
    emulated_wgmma(&product);
  }
  template <int kTransposeB, int kStepB>
  static void rs(float (&d)[kCount], const uint32_t* a, uint32_t b, int accumulate) {
    const EmulatedWgmma product = {d,
                                   a,
                                   0,
                                   emulated_descriptor(b + kStepB, kDescriptorHighWord),
                                   kColumns,
                                   static_cast<int>(kType),
                                   static_cast<int>(kTypeB),
                                   0,
                                   kTransposeB,
                                   accumulate,
                                   -1,
                                   0};
    emulated_wgmma(&product);
  }
};

template <int kColumns, WgmmaType kType>
struct SparseWgmma {
  static constexpr int kCount = kColumns / 2;
  template <int kStepA, int kStepB, int kSelector>
  static void ss(float (&d)[kCount], uint32_t a, uint32_t b, uint32_t metadata, int accumulate) {
    const EmulatedWgmma product = {d,
                                   nullptr,
                                   emulated_descriptor(a + kStepA, kShortDescriptorHighWord),
                                   emulated_descriptor(b + kStepB, kDescriptorHighWord),
                                   kColumns,
                                   static_cast<int>(kType),
                                   static_cast<int>(kType),
                                   0,
                                   0,
                                   accumulate,
                                   kSelector,
                                   metadata};
    emulated_wgmma(&product);
  }
};

}  // namespace kernel_pytorch::ptx
