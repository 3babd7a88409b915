// What host and device agree on for an optimizer's step: the list of parameters, in the kernel's parameters.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"
#include "kernel_pytorch/ops/support/tensor_list_cuda.h"

namespace kernel_pytorch::optimizer_step {

inline constexpr int kMaxParameters = 330;
inline constexpr int kThreads = 256;

// What extends a weight of 16 bits: nothing, 8 bits of a 24-bit master, or an fp32 master.
enum class WeightBits : uint8_t { kNone, kCorrection, kMaster };

// Bytes that a chunk of `unit` elements a thread takes in shared memory on its way to registers.
constexpr int staged_bytes(Rule rule, Storage storage, int parameter_bytes, int state_bytes, WeightBits weight_bits,
                           bool has_maximum, int unit) {
  const int states = 1 + (rule == Rule::kAdamW ? 1 : 0);
  const int weight = weight_bits == WeightBits::kMaster ? 4 : parameter_bytes;
  const int correction = weight_bits == WeightBits::kCorrection ? 1 : 0;
  const int element = weight + parameter_bytes + correction + (states + (has_maximum ? 1 : 0)) * state_bytes;
  const int scales = storage == Storage::kPlain ? 0 : 4 * states;
  return kThreads * (unit * element + scales);
}

struct Entry {
  void* parameter;
  const void* gradient;
  void* weight_bits;
  void* first;  // null: sgd without momentum
  void* second;
  void* maximum;
  float* first_scale;
  float* second_scale;
  float* step;
  int64_t elements;
  uint64_t random_block;  // Philox block of the first element
  int32_t chunk_end;      // chunks of this entry and of those before it
  bool is_aligned;        // every tensor to a unit, or to 16 bytes of one
};

struct Arguments {
  Entry entries[kMaxParameters];
  int32_t count;
  uint32_t* arrived;      // blocks that have read their steps
  const int64_t* seed;    // null: round to nearest
  const float* lr_value;  // null: lr; likewise
  const float* grad_scale;
  const float* found_inf;
  const float* total_norm;
  Rates rates;
};
static_assert(sizeof(Arguments) <= kMaxKernelParameterBytes);

}  // namespace kernel_pytorch::optimizer_step
