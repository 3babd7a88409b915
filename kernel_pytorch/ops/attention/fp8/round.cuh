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
inline constexpr int kPerLane = 16;  // columns of a row that a lane holds; kLanes of them have a row

template <int kLanes>
inline constexpr int kRowsAtOnce = 32 / kLanes;  // of a warp
template <int kLanes>
inline constexpr int kTurns = kBlockRows / (kRoundWarps * kRowsAtOnce<kLanes>);

// A lane's columns of a row; zeros where there are none.
template <class T>
__device__ __forceinline__ void load_elements(float (&values)[kPerLane], const T* row, int columns) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float pair[2] = {};
    if (i < columns) {
      if constexpr (sizeof(T) == 4) {
        pair[0] = row[i];
      } else {
        tile::Word<T>::unpack(row[i].bits, pair);
      }
    }
    values[i] = pair[0];
  }
}

// All rows of a lane: loads of all of them are under way before the first is used.
template <class T, int kLanes>
__device__ __forceinline__ void load_rows(float (&values)[kTurns<kLanes>][kPerLane], const RoundedTensor& tensor,
                                          const T* first, int32_t first_row) {
  const int column = static_cast<int>(threadIdx.x % kLanes) * kPerLane;
  constexpr int kStep = kRoundWarps * kRowsAtOnce<kLanes>;
  if (!tensor.has_vectors) {
#pragma unroll
    for (int i = 0; i < kTurns<kLanes>; ++i) {
      const int32_t row = first_row + i * kStep;
      const int columns = row < tensor.rows ? tensor.columns - column : 0;
      load_elements<T>(values[i], first + row * tensor.row + column, columns);
    }
    return;
  }
  constexpr int kVectors = kPerLane * static_cast<int>(sizeof(T)) / 16, kPerVector = kPerLane / kVectors;
  ptx::Word4 loaded[kTurns<kLanes>][kVectors];
#pragma unroll
  for (int i = 0; i < kTurns<kLanes>; ++i) {
    const int32_t row = first_row + i * kStep;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const bool is_inside = row < tensor.rows && column + j * kPerVector < tensor.columns;
      loaded[i][j] = ptx::ld_global_nc_l1_no_allocate_v4_if(
          is_inside, first + static_cast<int64_t>(row) * tensor.row + column + j * kPerVector);
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns<kLanes>; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t words[4] = {loaded[i][j].x, loaded[i][j].y, loaded[i][j].z, loaded[i][j].w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        tile::Word<T>::unpack(words[word], values[i] + j * kPerVector + word * tile::kPerWord<T>);
      }
    }
  }
}

// Signs, then a Hadamard matrix by sums and differences at distances 1, 2, 4, ..: the order that the host has too.
template <int kLanes>
__device__ __forceinline__ void rotate(float (&values)[kPerLane], int columns) {
  const int lane = static_cast<int>(threadIdx.x % kLanes);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = is_negated(lane * kPerLane + i) ? -values[i] : values[i];
#pragma unroll
  for (int distance = 1; distance < kPerLane; distance *= 2) {
    if (distance >= columns) break;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if ((i & distance) != 0) continue;
      const float low = values[i], high = values[i + distance];
      values[i] = low + high;
      values[i + distance] = low - high;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
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

template <class T>
__device__ __forceinline__ void store_values(const RoundedTensor& tensor, const float (&values)[kPerLane], T* row,
                                             int column, float scale) {
#pragma unroll
  for (int i = 0; i < kPerLane; i += 4) {
    float decoded[4];
    tile::Word<tile::Float8E4M3>::unpack(tile::Word<tile::Float8E4M3>::pack(values + i), decoded);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + i + j >= tensor.target_columns) continue;
      // A comparison, not a minimum, so that NaN stays.
      const float scaled = decoded[j] * scale;
      const float value[2] = {scaled > kLargest<T> ? kLargest<T> : scaled < -kLargest<T> ? -kLargest<T> : scaled, 0.0f};
      if constexpr (sizeof(T) == 4) {
        row[column + i + j] = value[0];
      } else {
        row[column + i + j].bits = static_cast<uint16_t>(tile::Word<T>::pack(value));
      }
    }
  }
}

// The largest of a number over the block of threads, which has the bits of floats that are not negative.
__device__ __forceinline__ uint32_t block_max(uint32_t most, uint32_t (&of_warps)[kRoundWarps]) {
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRoundWarps; ++i) most = max(most, of_warps[i]);
  return most;
}

// kLanes: 8 for up to 128 columns, 16 for up to 256.
template <class T, int kLanes>
__global__ void __launch_bounds__(kRoundThreads, kLanes == 8 ? 2 : 1)
    round_operands(const __grid_constant__ RoundArguments arguments) {
  __shared__ __align__(16) uint32_t codes[kBlockRows * 32];
  __shared__ uint32_t largest[2][kRoundWarps];
  tile::follow_closely();
  const auto index = static_cast<int32_t>(blockIdx.x);
  int which = 0;
  if (index >= arguments.tensors[1].first_block) which = 1;
  if (index >= arguments.tensors[2].first_block) which = 2;
  const RoundedTensor& tensor = arguments.tensors[which];
  const int32_t place = index - tensor.first_block, head = place / tensor.blocks, block = place - head * tensor.blocks;
  const int32_t batch = head / tensor.heads;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int unit = lane % kLanes, warp_row = warp * kRowsAtOnce<kLanes> + lane / kLanes;
  constexpr int kStep = kRoundWarps * kRowsAtOnce<kLanes>;
  const T* source =
      static_cast<const T*>(tensor.source) + batch * tensor.batch + (head - batch * tensor.heads) * tensor.head;

  float values[kTurns<kLanes>][kPerLane];
  load_rows<T, kLanes>(values, tensor, source, block * kBlockRows + warp_row);
  if (tensor.rotated > 0) {
#pragma unroll
    for (int i = 0; i < kTurns<kLanes>; ++i) rotate<kLanes>(values[i], tensor.rotated);
  }
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kTurns<kLanes>; ++i) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) most = max(most, __float_as_uint(values[i][j]) & 0x7fffffffu);
  }
  most = block_max(most, largest[0]);
  const int exponent = scale_exponent(most);
  const float scale = __uint_as_float(power_of_two_bits(exponent));
  const float factor = __uint_as_float(power_of_two_bits(-exponent));
  if (threadIdx.x == 0 && tensor.scales != nullptr) tensor.scales[place] = scale;

#pragma unroll
  for (int i = 0; i < kTurns<kLanes>; ++i) {
    const int row = i * kStep + warp_row;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[i][j] *= factor;
    if (tensor.kind == Target::kValues) {
      const int32_t at = block * kBlockRows + row;
      if (at >= tensor.rows) continue;
      T* target =
          static_cast<T*>(tensor.target) + (static_cast<int64_t>(head) * tensor.rows + at) * tensor.target_columns;
      store_values<T>(tensor, values[i], target, unit * kPerLane, scale);
      continue;
    }
    if constexpr (kLanes == 8) {
      using Codes = tile::Word<tile::Float8E4M3>;
      const ptx::Word4 words{Codes::pack(values[i]), Codes::pack(values[i] + 4), Codes::pack(values[i] + 8),
                             Codes::pack(values[i] + 12)};
      if (tensor.kind == Target::kCodes) {
        const int64_t at = (static_cast<int64_t>(head) * tensor.blocks + block) * kBlockRows + row;
        ptx::st_global_v4(static_cast<unsigned char*>(tensor.target) + at * 128 + unit * 16, words);
      } else {
        ptx::st_shared_v4(ptx::shared_address(codes) + row * 128 + (unit ^ row / 16) * 16, words);
      }
    }
  }
  if (tensor.norms != nullptr) {
    float longest = 0;
#pragma unroll
    for (int i = 0; i < kTurns<kLanes>; ++i) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) squares = fmaf(values[i][j], values[i][j], squares);
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, distance);
      }
      longest = fmaxf(longest, squares);
    }
    longest = __uint_as_float(block_max(__float_as_uint(longest), largest[1]));
    // Codes are no more than a sixteenth longer than what they were rounded from.
    if (threadIdx.x == 0) tensor.norms[place] = 1.07f * scale * sqrtf(longest);
  }
  if (tensor.kind != Target::kTransposedCodes) return;
  __syncthreads();
  store_transposed(tensor, codes, head, block);
}

}  // namespace kernel_pytorch::attention::fp8
