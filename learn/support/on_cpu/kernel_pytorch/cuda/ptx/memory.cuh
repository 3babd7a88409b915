// Stands before the shipped header of this name when a kernel runs on a CPU.
#pragma once
#include "cuda.h"

namespace kernel_pytorch::ptx {
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
}
}  // namespace kernel_pytorch::ptx
