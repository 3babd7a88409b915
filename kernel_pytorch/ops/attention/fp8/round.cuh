// Rounds queries, keys and values to e4m3, 128 rows of a head to a scale, in one launch and one visit: a block of
// threads holds its rows in registers between their maximum and their codes. sm_89.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/attention/fp8/rounding_cuda.h"

namespace kernel_pytorch::attention::fp8 {

inline constexpr int kRoundThreads = 256;
inline constexpr int kRoundWarps = kRoundThreads / 32;
inline constexpr int kRowsPerWarp = kBlockRows / kRoundWarps;

// kPerLane columns of a row, a lane after the other; zeros where there are none.
template <class T, int kPerLane>
__device__ __forceinline__ void load_row(float (&values)[kPerLane], const RoundedTensor& tensor, const T* row,
                                         bool is_inside) {
  const int first = static_cast<int>(threadIdx.x % 32) * kPerLane;
  constexpr int kPerUnit = 4;
  if (tensor.has_vectors) {
#pragma unroll
    for (int unit = 0; unit < kPerLane / kPerUnit; ++unit) {
      uint32_t words[sizeof(T)] = {};
      if (is_inside && first + unit * kPerUnit < tensor.columns) {
        const auto* source = reinterpret_cast<const uint32_t*>(row + first + unit * kPerUnit);
        if constexpr (sizeof(T) == 4) {
          const ptx::Word4 loaded = ptx::ld_global_nc_v4(source);
          words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
        } else {
          const uint2 loaded = __ldg(reinterpret_cast<const uint2*>(source));
          words[0] = loaded.x, words[1] = loaded.y;
        }
      }
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
        tile::Word<T>::unpack(words[i], values + unit * kPerUnit + i * tile::kPerWord<T>);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float pair[2] = {};
    if (is_inside && first + i < tensor.columns) {
      if constexpr (sizeof(T) == 4) {
        pair[0] = row[first + i];
      } else {
        tile::Word<T>::unpack(row[first + i].bits, pair);
      }
    }
    values[i] = pair[0];
  }
}

// Signs, then a Hadamard matrix by sums and differences at distances 1, 2, 4, ..: the order that the host has too.
template <int kPerLane>
__device__ __forceinline__ void rotate(float (&values)[kPerLane], int columns) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = is_negated(lane * kPerLane + i) ? -values[i] : values[i];
#pragma unroll
  for (int distance = 1; distance < kPerLane; distance *= 2) {
    if (distance >= columns) return;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if ((i & distance) != 0) continue;
      const float low = values[i], high = values[i + distance];
      values[i] = low + high;
      values[i + distance] = low - high;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance * kPerLane >= columns) break;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, values[i], distance);
      values[i] = (lane & distance) != 0 ? other - values[i] : values[i] + other;
    }
  }
  const float factor = __uint_as_float(power_of_two_bits(-halved_exponent(columns)));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] *= factor;
}

// The 4 x 4 bytes of four words, transposed.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low_01 = __byte_perm(words[0], words[1], 0x5140), high_01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low_23 = __byte_perm(words[2], words[3], 0x5140), high_23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low_01, low_23, 0x5410);
  words[1] = __byte_perm(low_01, low_23, 0x7632);
  words[2] = __byte_perm(high_01, high_23, 0x5410);
  words[3] = __byte_perm(high_01, high_23, 0x7632);
}

// A block's codes, [128 keys][32 words] with words swizzled by the key's sixteenth, to rows of keys.
__device__ __forceinline__ void store_transposed(const RoundedTensor& tensor, const uint32_t* codes, int64_t head,
                                                 int32_t block) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int sixteenth = lane % 8, word = warp * 4 + lane / 8;  // 16 keys, and four columns
  uint32_t rows[4][4];
#pragma unroll
  for (int unit = 0; unit < 4; ++unit) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = sixteenth * 16 + key_at_position(unit * 4 + i);
      words[i] = codes[key * 32 + (word ^ sixteenth * 4)];
    }
    transpose_bytes(words);
#pragma unroll
    for (int column = 0; column < 4; ++column) rows[column][unit] = words[column];
  }
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    if (word * 4 + column >= tensor.target_columns) continue;
    const int64_t row = head * tensor.target_columns + word * 4 + column;
    auto* target = static_cast<unsigned char*>(tensor.target) + row * tensor.blocks * kBlockRows + block * kBlockRows;
    ptx::st_global_v4(target + sixteenth * 16, {rows[column][0], rows[column][1], rows[column][2], rows[column][3]});
  }
}

// fp16's largest values round up beyond its range.
template <class T>
inline constexpr float kLargest = 3.4e38f;
template <>
inline constexpr float kLargest<tile::Float16> = 65504.0f;

template <class T, int kPerLane>
__device__ __forceinline__ void store_values(const RoundedTensor& tensor, const float (&values)[kPerLane], int64_t row,
                                             float scale) {
  const int first = static_cast<int>(threadIdx.x % 32) * kPerLane;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 4) {
    float decoded[4];
    tile::Word<tile::Float8E4M3>::unpack(tile::Word<tile::Float8E4M3>::pack(values + i), decoded);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (first + i + j >= tensor.target_columns) continue;
      T* target = static_cast<T*>(tensor.target) + row * tensor.target_columns + first + i + j;
      // A comparison, not a minimum, so that NaN stays.
      const float scaled = decoded[j] * scale;
      const float value[2] = {scaled > kLargest<T> ? kLargest<T> : scaled < -kLargest<T> ? -kLargest<T> : scaled, 0.0f};
      if constexpr (sizeof(T) == 4) {
        *target = value[0];
      } else {
        target->bits = static_cast<uint16_t>(tile::Word<T>::pack(value));
      }
    }
  }
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kRoundThreads) round_operands(const __grid_constant__ RoundArguments arguments) {
  __shared__ uint32_t codes[kBlockRows * 32];
  __shared__ uint32_t largest[kRoundWarps];
  tile::follow_closely();
  const auto index = static_cast<int32_t>(blockIdx.x);
  int which = 0;
  if (index >= arguments.tensors[1].first_block) which = 1;
  if (index >= arguments.tensors[2].first_block) which = 2;
  const RoundedTensor& tensor = arguments.tensors[which];
  const int32_t place = index - tensor.first_block, head = place / tensor.blocks, block = place - head * tensor.blocks;
  const int32_t batch = head / tensor.heads;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const T* source =
      static_cast<const T*>(tensor.source) + batch * tensor.batch + (head - batch * tensor.heads) * tensor.head;

  float values[kRowsPerWarp][kPerLane];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int32_t row = block * kBlockRows + i * kRoundWarps + warp;
    load_row<T, kPerLane>(values[i], tensor, source + row * tensor.row, row < tensor.rows);
  }
  if (tensor.rotated > 0) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) rotate<kPerLane>(values[i], tensor.rotated);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) most = max(most, __float_as_uint(values[i][j]) & 0x7fffffffu);
  }
  most = __reduce_max_sync(0xffffffffu, most);
  if (lane == 0) largest[warp] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRoundWarps; ++i) most = max(most, largest[i]);
  const int exponent = scale_exponent(most);
  const float scale = __uint_as_float(power_of_two_bits(exponent));
  const float factor = __uint_as_float(power_of_two_bits(-exponent));
  if (threadIdx.x == 0 && tensor.scales != nullptr) tensor.scales[place] = scale;

#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = i * kRoundWarps + warp;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[i][j] *= factor;
    if (tensor.kind == Target::kValues) {
      const int32_t at = block * kBlockRows + row;
      if (at < tensor.rows) {
        store_values<T, kPerLane>(tensor, values[i], static_cast<int64_t>(head) * tensor.rows + at, scale);
      }
      continue;
    }
    if constexpr (kPerLane == 4) {
      const uint32_t word = tile::Word<tile::Float8E4M3>::pack(values[i]);
      if (tensor.kind == Target::kCodes) {
        const int64_t at = (static_cast<int64_t>(head) * tensor.blocks + block) * kBlockRows + row;
        static_cast<uint32_t*>(tensor.target)[at * 32 + lane] = word;
      } else {
        codes[row * 32 + (lane ^ row / 16 * 4)] = word;
      }
    }
  }
  if (tensor.kind != Target::kTransposedCodes) return;
  __syncthreads();
  store_transposed(tensor, codes, head, block);
}

}  // namespace kernel_pytorch::attention::fp8
