// The product of 16-bit fragments whatever their type. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/mma.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"

namespace kernel_pytorch::tile {

template <class T>
__device__ __forceinline__ void multiply_fragments(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_fragments<BFloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                             uint32_t b1) {
  ptx::mma_m16n8k16_f32_bf16(sum, a, b0, b1);
}
template <>
__device__ __forceinline__ void multiply_fragments<Float16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  ptx::mma_m16n8k16_f32_f16(sum, a, b0, b1);
}

}  // namespace kernel_pytorch::tile
