// Named barriers, emulated: runtime/barriers.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void barrier_sync(int barrier, int threads) {
  emulated_named_barrier(barrier, threads, 1);
}
inline void barrier_sync_aligned(int barrier, int threads) {
  emulated_named_barrier(barrier, threads, 1);
}
inline void barrier_arrive_aligned(int barrier, int threads) {
  emulated_named_barrier(barrier, threads, 0);
}

}  // namespace kernel_pytorch::ptx
