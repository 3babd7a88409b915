// Programmatic dependent launch, registers handed from one warpgroup to another, and a word to the compiler. sm_90; a
// kernel launched without the attribute runs the first two as no-ops.
#pragma once

namespace kernel_pytorch::ptx {

// The next kernel of the stream may begin once every block has said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernels ahead have ended and their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// sm_90a. All warps of a warpgroup give up, or wait for, registers down or up to kRegisters a thread (a multiple of 8,
// 24 to 256). Taken by the compiler only under __launch_bounds__(threads, 1), each role in one branch of one if.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The compiler forgets how a value came about, so that what was computed from it is computed again instead of kept.
__device__ __forceinline__ void forget_origin(unsigned int& value) {
  asm("" : "+r"(value));
}

}  // namespace kernel_pytorch::ptx
