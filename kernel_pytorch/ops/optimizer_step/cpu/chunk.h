// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::optimizer_step {

// A stretch of one parameter's elements, which begins with a group and a Philox block; pointers to its first.
struct ChunkArguments {
  int64_t count = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  uint8_t* correction = nullptr;  // null: none
  float* master = nullptr;        // null: none
  void* first = nullptr;          // null: sgd without momentum
  void* second = nullptr;
  void* maximum = nullptr;  // null: no amsgrad
  float* first_scale = nullptr;
  float* second_scale = nullptr;
  Factors factors{};
  const DynamicMap<true>* first_map = nullptr;  // of the dynamic storage
  const DynamicMap<false>* second_map = nullptr;
  int32_t prefetch_bytes = 0;  // how far ahead plain states are fetched; 0: the hardware does it alone
  bool is_stochastic = false;
  uint64_t seed = 0;
  uint64_t offset = 0;
  uint64_t block = 0;  // Philox block of the first element
};

// Types of parameters and plain states that kernels are built for; lion and sgd have fp32 states.
enum class Types : int { kFloat, kBFloat16Float, kFloat16Float, kFloatBFloat16, kBFloat16, kFloat16 };
inline constexpr int kTypesCount = 6, kFloatStates = 3;

struct PlainKernels {
  void (*adamw[kTypesCount])(const ChunkArguments&);
  void (*lion[kFloatStates])(const ChunkArguments&);
  void (*sgd[kFloatStates])(const ChunkArguments&);
};
struct CodedKernels {
  void (*step[kRules][kStorages - 1][3])(const ChunkArguments&);  // by rule, storage after plain, cpu_type_index
};

KP_EACH_CPU_LEVEL(extern const PlainKernels kPlainKernels; extern const CodedKernels kCodedKernels;)

}  // namespace kernel_pytorch::optimizer_step
