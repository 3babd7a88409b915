// Numbers to units of their type: to nearest, or stochastically where bf16 has a seed.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cuda/tile/unit.cuh"
#include "kernel_pytorch/ops/optimizer_step/draws_cuda.h"

namespace kernel_pytorch::optimizer_step {

using tile::packed;
using tile::Unit;

// Random bits round bf16 alone; for the other types nothing of it is compiled.
template <class T>
inline constexpr bool kMayDraw = false;
template <>
inline constexpr bool kMayDraw<tile::BFloat16> = true;

struct Random {
  const int64_t* seed;  // null: to nearest
  uint64_t first_block;

  // `index` is a multiple of kCount, 4 or 8: a unit takes half of a block or a whole one.
  template <class T, int kCount>
  __device__ __forceinline__ Unit<T, kCount> rounded(const float (&values)[kCount], int64_t index, Draw draw) const {
    if constexpr (kMayDraw<T>) {
      if (seed != nullptr) {
        static_assert(kCount == 4 || kCount == 8);
        const PhiloxBlock block = philox(seed[0], seed[1], draw_block(first_block + index / kPhiloxElements, draw));
        const bool is_second = kCount == 4 && index % kPhiloxElements != 0;
        Unit<T, kCount> unit;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
          const uint32_t word = kCount == 8 || !is_second ? block.words[i] : block.words[(i + 2) % 4];
          const uint32_t low = round_stochastically(__float_as_uint(values[2 * i]), word & 0xffff);
          const uint32_t high = round_stochastically(__float_as_uint(values[2 * i + 1]), word >> 16);
          unit.words[i] = low | high << 16;
        }
        return unit;
      }
    }
    return packed<T>(values);
  }
};

}  // namespace kernel_pytorch::optimizer_step
