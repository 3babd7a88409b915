// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::optimizer_step {

// A stretch of one parameter's elements, which begins with a group; pointers to its first.
struct ChunkArguments {
  int64_t count = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  uint8_t* correction = nullptr;  // null: none
  void* first = nullptr;          // null: sgd without momentum
  void* second = nullptr;
  float* first_scale = nullptr;
  float* second_scale = nullptr;
  Factors factors{};
  const DynamicMap<true>* first_map = nullptr;  // of the dynamic storage
  const DynamicMap<false>* second_map = nullptr;
};

struct ChunkKernels {
  void (*step[kRules][kStorages][3])(const ChunkArguments&);  // by rule, storage and cpu_type_index
};

KP_EACH_CPU_LEVEL(extern const ChunkKernels kChunkKernels;)

}  // namespace kernel_pytorch::optimizer_step
