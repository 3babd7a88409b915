// Codes of gradients: a warp takes a tile of 256 numbers, each thread four of either half, and visits them once. The
// scale of a block is a maximum or a sum over its threads' shuffles.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/unit.cuh"
#include "kernel_pytorch/ops/gradient_code/cuda/arguments_cuda.h"

namespace kernel_pytorch::gradient_code {

inline constexpr int kUnit = 4, kHalf = kTile / 2;
template <class T>
using Unit = tile::Unit<T, kUnit>;

// Where a thread's numbers of a half are; `is_whole` is the same for all threads of a warp.
struct Place {
  int64_t index, limit;
  bool is_whole;

  template <class T>
  __device__ __forceinline__ Unit<T> load(const void* from) const {
    return is_whole ? Unit<T>::load(from, index) : Unit<T>::load_some(from, index, limit);
  }
  template <class T>
  __device__ __forceinline__ void store(void* to, const float (&values)[kUnit]) const {
    const Unit<T> unit = tile::packed<T>(values);
    if (is_whole) {
      unit.store(to, index);
    } else {
      unit.store_some(to, index, limit);
    }
  }
};

template <int kLanes>
__device__ __forceinline__ float largest_over(float value) {
  uint32_t bits = __float_as_uint(value);
  if constexpr (kLanes == 32) {
    bits = __reduce_max_sync(0xffffffffu, bits);
  } else {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, lane));
  }
  return __uint_as_float(bits);
}
__device__ __forceinline__ float largest_of(const float (&values)[kUnit], float most) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) most = ptx::max_nan_f32(most, fabsf(values[i]));
  return most;
}
__device__ __forceinline__ float sum_of(const float (&values)[kUnit]) {
  return __fadd_rn(__fadd_rn(fabsf(values[0]), fabsf(values[1])), __fadd_rn(fabsf(values[2]), fabsf(values[3])));
}
__device__ __forceinline__ float finite_scale(float scale) {
  return scale <= 0x1.fffffep127f ? scale : __int_as_float(0x7fffffff);
}

// Blocks of either half of a tile have a scale each, or both halves are one block.
template <Code kCode>
__device__ __forceinline__ void set_scales(const float (&values)[2][kUnit], float (&scales)[2]) {
  if constexpr (kCode == Code::kInt4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[half] = finite_scale(__fdiv_rn(largest_over<16>(largest_of(values[half], 0.0f)), largest_step(kCode)));
    }
  } else {
    if constexpr (kCode == Code::kInt8) {
      const float most = largest_over<32>(largest_of(values[1], largest_of(values[0], 0.0f)));
      scales[0] = finite_scale(__fdiv_rn(most, largest_step(kCode)));
    } else {
      float sum = __fadd_rn(sum_of(values[0]), sum_of(values[1]));
#pragma unroll
      for (int lane = 16; lane > 0; lane /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lane));
      scales[0] = finite_scale(__fmul_rn(sum, 1.0f / kTile));
    }
    scales[1] = scales[0];
  }
}

// The codes of a thread's four numbers of a half, as the message has them.
template <Code kCode>
__device__ __forceinline__ void store_codes(const uint32_t (&steps)[kUnit], uint8_t* codes, int half, int lane) {
  if constexpr (kCode == Code::kInt8) {
    *reinterpret_cast<uint32_t*>(codes + half * kHalf + lane * 4) =
        tile::joined_bytes(steps[0], steps[1], steps[2], steps[3]);
  } else if constexpr (kCode == Code::kInt4) {
    const uint32_t four =
        (steps[0] + 8 & 15) | (steps[1] + 8 & 15) << 4 | (steps[2] + 8 & 15) << 8 | (steps[3] + 8 & 15) << 12;
    *reinterpret_cast<uint16_t*>(codes + half * kHalf / 2 + lane * 2) = static_cast<uint16_t>(four);
  } else {
    uint32_t word = (steps[0] | steps[1] << 1 | steps[2] << 2 | steps[3] << 3) << (lane % 8 * 4);
#pragma unroll
    for (int other = 1; other < 8; other *= 2) word |= __shfl_xor_sync(0xffffffffu, word, other);
    if (lane % 8 == 0) *reinterpret_cast<uint32_t*>(codes + half * kHalf / 8 + lane / 8 * 4) = word;
  }
}
template <Code kCode>
__device__ __forceinline__ void load_steps(const uint8_t* codes, int half, int lane, float (&steps)[kUnit]) {
  uint32_t four;
  if constexpr (kCode == Code::kInt8) {
    four = *reinterpret_cast<const uint32_t*>(codes + half * kHalf + lane * 4);
  } else if constexpr (kCode == Code::kInt4) {
    four = *reinterpret_cast<const uint16_t*>(codes + half * kHalf / 2 + lane * 2);
  } else {
    four = codes[half * kHalf / 8 + lane / 2] >> (lane % 2 * 4);
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if constexpr (kCode == Code::kInt8) {
      steps[i] = static_cast<float>(static_cast<int8_t>(tile::byte_of(four, i)));
    } else if constexpr (kCode == Code::kInt4) {
      steps[i] = static_cast<float>(static_cast<int>(four >> (4 * i) & 15) - 8);
    } else {
      steps[i] = (four >> i & 1) != 0 ? 1.0f : -1.0f;
    }
  }
}

template <class T, Code kCode>
__global__ void __launch_bounds__(kThreads) encode(const __grid_constant__ EncodeArguments arguments) {
  constexpr int kBlock = block_elements(kCode), kBlocks = kTile / kBlock;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int number = static_cast<int>(blockIdx.x) * kTilesOfBlock + static_cast<int>(threadIdx.x) / 32;
  if (number >= arguments.tiles) return;
  const int64_t begin = static_cast<int64_t>(number) * kTile;
  const bool is_whole = arguments.is_aligned && begin + kTile <= arguments.count;
  Place places[2];
  Unit<T> x[2];
  Unit<float> error[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    places[half] = {begin + half * kHalf + lane * kUnit, arguments.count, is_whole};
    x[half] = places[half].template load<T>(arguments.x);
    if (arguments.error != nullptr) error[half] = places[half].template load<float>(arguments.error);
  }
  const bool adds_error = arguments.error != nullptr && arguments.carries;
  float values[2][kUnit], scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values[half][i] = tile::value_of(x[half], i);
      if (adds_error) values[half][i] = __fadd_rn(values[half][i], tile::value_of(error[half], i));
    }
  }
  set_scales<kCode>(values, scales);
  const int row = number / arguments.tiles_of_row, column = number % arguments.tiles_of_row;
  uint8_t* const codes = arguments.codes + row * arguments.code_stride + column * (kTile * bits_of(kCode) / 8);
  float* const scales_to = arguments.scales + row * arguments.scale_stride + column * kBlocks;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (kCode == Code::kInt4 ? lane % 16 == 0 : half == 0 && lane == 0) {
      scales_to[kCode == Code::kInt4 ? half * 2 + lane / 16 : 0] = scales[half];
    }
    const float inverse = scales[half] >= kLeastScale ? __fdiv_rn(1.0f, scales[half]) : 0.0f;
    uint32_t steps[kUnit];
    float left[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      float step;
      if constexpr (kCode == Code::kOneBit) {
        steps[i] = values[half][i] >= 0.0f ? 1 : 0;
        step = steps[i] != 0 ? 1.0f : -1.0f;
      } else {
        const float rounded = __fmaf_rn(values[half][i], inverse, kRounder);
        steps[i] = __float_as_uint(rounded);  // other bits above the lowest are left out later
        step = __fadd_rn(rounded, -kRounder);
      }
      left[i] = __fmaf_rn(-step, scales[half], values[half][i]);
      if (arguments.error != nullptr && !arguments.carries) {
        left[i] = __fmaf_rn(left[i], arguments.gain, tile::value_of(error[half], i));
      }
      left[i] = fabsf(left[i]) <= 0x1.fffffep127f ? left[i] : 0.0f;
    }
    store_codes<kCode>(steps, codes, half, lane);
    if (arguments.error != nullptr) places[half].template store<float>(arguments.error, left);
  }
}

template <class T, Code kCode>
__global__ void __launch_bounds__(kThreads) decode(const __grid_constant__ DecodeArguments arguments) {
  constexpr int kBlock = block_elements(kCode), kBlocks = kTile / kBlock;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int number = static_cast<int>(blockIdx.x) * kTilesOfBlock + static_cast<int>(threadIdx.x) / 32;
  if (number >= arguments.tiles) return;
  const int64_t begin = static_cast<int64_t>(number) * kTile;
  const bool is_whole = arguments.is_aligned && begin + kTile <= arguments.count;
  const int first_row = number / arguments.tiles_of_row, column = number % arguments.tiles_of_row;
  const uint8_t* codes = arguments.codes + first_row * arguments.code_stride + column * (kTile * bits_of(kCode) / 8);
  const float* scales = arguments.scales + first_row * arguments.scale_stride + column * kBlocks;
  float values[2][kUnit] = {};
#pragma unroll 2
  for (int row = 0; row < arguments.rows; ++row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float steps[kUnit];
      load_steps<kCode>(codes, half, lane, steps);
      const float scale = scales[kCode == Code::kInt4 ? half * 2 + lane / 16 : 0];
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[half][i] = __fmaf_rn(steps[i], scale, values[half][i]);
    }
    codes += arguments.code_stride;
    scales += arguments.scale_stride;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Place place{begin + half * kHalf + lane * kUnit, arguments.count, is_whole};
    Unit<T> old{};
    if (arguments.adds) old = place.template load<T>(arguments.output);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (arguments.is_mean) values[half][i] = __fdiv_rn(values[half][i], static_cast<float>(arguments.rows));
      if (arguments.adds) values[half][i] = __fadd_rn(values[half][i], tile::value_of(old, i));
    }
    place.template store<T>(arguments.output, values[half]);
  }
}

}  // namespace kernel_pytorch::gradient_code
