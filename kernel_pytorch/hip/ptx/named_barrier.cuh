// A workgroup has one barrier, that of all its waves. A group of two warps is one wave and needs none: in every use of
// a numbered barrier by 64 threads these are neighbours that begin at a multiple of 64.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

KP_NO_AMD_FORM("barriers of a part of a block that is not one wave") void barrier_of_several_waves();

// `threads` is a constant after inlining.
__device__ __forceinline__ void barrier_sync(int, int threads) {
  if (threads == 64) {
    hip::synchronise_wave();
  } else {
    barrier_of_several_waves();
  }
}
__device__ __forceinline__ void barrier_sync_aligned(int barrier, int threads) {
  barrier_sync(barrier, threads);
}
KP_NO_AMD_FORM("barriers to come to without waiting") void barrier_arrive_aligned(int barrier, int threads);

}  // namespace kernel_pytorch::ptx
