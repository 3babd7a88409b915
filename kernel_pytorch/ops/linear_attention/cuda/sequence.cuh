// Where a scan's sequences lie, and its gates.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/linear_attention/cuda/scan_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::linear_attention {

struct Span {
  int64_t batch, begin, end;
};
// Wrong offsets read no foreign memory.
template <class Arguments>
__device__ __forceinline__ Span span_of(const Arguments& arguments, int64_t sequence) {
  if (arguments.offsets == nullptr) return {sequence, 0, arguments.tokens};
  const auto at = [&](int64_t i) {
    const int64_t offset = index_at(arguments.offsets, arguments.offsets_are_wide, i);
    return static_cast<int64_t>(min(max(offset, 0ll), static_cast<long long>(arguments.tokens)));
  };
  const int64_t begin = at(sequence), end = at(sequence + 1);
  return {0, begin, end > begin ? end : begin};
}

template <class T>
__device__ __forceinline__ T* row_of(const ScanTensor& tensor, int64_t batch, int64_t token, int head) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + token * tensor.token_stride +
         head / tensor.group * tensor.head_stride;
}
template <class T>
__device__ __forceinline__ float element_of(const ScanTensor& tensor, int64_t batch, int64_t token, int head, int at) {
  return tensor.is_float ? row_of<float>(tensor, batch, token, head)[at]
                         : tile::to_float<T>(row_of<T>(tensor, batch, token, head)[at]);
}

// The gate of a token and head, with the head's decay.
template <class T>
__device__ __forceinline__ float scalar_gate(const ScanArguments& arguments, int64_t batch, int64_t token, int head) {
  const float decay = arguments.decay != nullptr ? arguments.decay[head] : 0.0f;
  return arguments.gate.data == nullptr ? decay : decay + element_of<T>(arguments.gate, batch, token, head, 0);
}
template <class T>
__device__ __forceinline__ float channel_gate(const ScanArguments& arguments, int64_t batch, int64_t token, int head,
                                              int channel) {
  return arguments.channel_gate.data == nullptr ? 0.0f
                                                : element_of<T>(arguments.channel_gate, batch, token, head, channel);
}

// Where gates are summed: -inf has no differences, and e^-104 is 0 in fp32. Keeps a NaN.
inline constexpr float kLeastGate = -104.0f;
__device__ __forceinline__ float finite_gate(float gate) {
  return gate < kLeastGate ? kLeastGate : gate;
}

inline constexpr float kLog2OfE = 1.4426950408889634f;
__device__ __forceinline__ float exponential(float x) {
  return ptx::ex2_approx_ftz_f32(x * kLog2OfE);
}

}  // namespace kernel_pytorch::linear_attention
