// Programmatic dependent launch as two verbs; before sm_90 kernels simply follow one another and these do nothing.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"

namespace kernel_pytorch::tile {

// The next kernel of the stream may start to be scheduled; it still has to wait for this one's writes.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif
}

// Call before touching anything that an earlier kernel wrote.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_wait();
#endif
}

// Both, for kernels that have nothing to do before earlier ones have ended.
__device__ __forceinline__ void follow_closely() {
  let_next_kernel_start();
  wait_for_earlier_kernels();
}

}  // namespace kernel_pytorch::tile
