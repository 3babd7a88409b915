// The four lanes that share rows of a matrix fragment, as a 4 x 4 matrix of words.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"

namespace kernel_pytorch::tile {

// Four lanes hold four words each: afterwards lane i holds every lane's word i, in the order of the lanes. So 16
// contiguous bytes a lane become the pairs of four groups of eight columns, and the other way round.
__device__ __forceinline__ ptx::Word4 transpose_quad(ptx::Word4 words) {
  const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x / 2 % 2 != 0;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? words.x : words.y, 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? words.z : words.w, 1);
  words = odd ? ptx::Word4{first, words.y, second, words.w} : ptx::Word4{words.x, first, words.z, second};
  const uint32_t third = __shfl_xor_sync(0xffffffffu, high ? words.x : words.z, 2);
  const uint32_t fourth = __shfl_xor_sync(0xffffffffu, high ? words.y : words.w, 2);
  return high ? ptx::Word4{third, fourth, words.z, words.w} : ptx::Word4{words.x, words.y, third, fourth};
}

}  // namespace kernel_pytorch::tile
