// mbarrier, emulated: runtime/barriers.cpp. A wait parks the thread until the phase is over.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  emulated_mbarrier_init(barrier, count);
}
inline void mbarrier_arrive(uint32_t barrier) {
  emulated_mbarrier_arrive(barrier, 0);
}
inline void mbarrier_arrive_shared_cluster(uint32_t barrier) {
  emulated_mbarrier_arrive(barrier, 0);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulated_mbarrier_arrive(barrier, bytes);
}
inline bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  return emulated_mbarrier_try_wait(barrier, parity) != 0;
}
inline bool mbarrier_try_wait_parity_acquire_cluster(uint32_t barrier, uint32_t parity) {
  return emulated_mbarrier_try_wait(barrier, parity) != 0;
}

}  // namespace kernel_pytorch::ptx
