// Programmatic dependent launch. sm_90; a kernel launched without the attribute runs both as no-ops.
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

}  // namespace kernel_pytorch::ptx
