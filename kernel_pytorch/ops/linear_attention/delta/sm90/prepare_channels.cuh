// What the chunks of the delta rule need besides the state, for gates of channels (chunk_cuda.h). A block takes one
// chunk of one head.
//
// e^(G_t - G_s) of each column goes into both factors of a product: e^(G_t - G_r) of the query's row and e^(G_r - G_s)
// of the key's, with a token r between them, so that neither is above 1. A warp has 16 rows. For keys in front of them
// r is the first of these rows. Among them, pairs whose places differ first in bit L (8, 4, 2, 1) have for r the middle
// of the 2L rows they share: a row's factor is the same whether it is the query's or the key's, and what else the
// product gives is not taken. sm_80.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/sm90/prepare.cuh"

namespace kernel_pytorch::linear_attention::delta {

// Sums of gates of each column, in base 2; gates behind the end are none.
template <class T, int kWidth>
__device__ __forceinline__ void sum_channel_gates(const PrepareArguments& arguments, const ChunkPlace& place, int head,
                                                  float* sums) {
  const int column = threadIdx.x;
  if (column >= kWidth) return;
  float sum = 0;
#pragma unroll 8
  for (int t = 0; t < kChunkTokens; ++t) {
    if (t < place.count && column < arguments.columns) {
      float gate = element_of<T>(arguments.channel_gate, place.batch, place.first + t, head, column);
      if (arguments.gate.data != nullptr) gate += element_of<T>(arguments.gate, place.batch, place.first + t, head, 0);
      sum += finite_gate(gate) * kLog2OfE;
    }
    sums[t * sums_pitch(kWidth) + column] = sum;
  }
}

// Rows with their factors, for the second kernel: eight columns at a time.
template <class T, int kWidth>
__device__ __forceinline__ void store_rows(const PrepareArguments& arguments, const unsigned char* keys,
                                           const unsigned char* queries, const float* sums,
                                           const float (&key_norms)[kChunkTokens],
                                           const float (&query_norms)[kChunkTokens]) {
  constexpr int kUnits = kWidth / 8;
  const float* last = sums + (kChunkTokens - 1) * sums_pitch(kWidth);
#pragma unroll 1
  for (int i = threadIdx.x; i < kChunkTokens * kUnits; i += kPrepareThreads) {
    const int row = i / kUnits, unit = i % kUnits;
    const int from = row * prepared_row_bytes(kWidth) + unit * 16;
    float key[8], query[8], written[8];
    tile::Vector<T>{*reinterpret_cast<const ptx::Word4*>(keys + from)}.unpack(key);
    tile::Vector<T>{*reinterpret_cast<const ptx::Word4*>(queries + from)}.unpack(query);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float sum = sums[row * sums_pitch(kWidth) + unit * 8 + k], into = ptx::ex2_approx_ftz_f32(sum);
      key[k] *= key_norms[row];
      written[k] = key[k] * ptx::ex2_approx_ftz_f32(last[unit * 8 + k] - sum);
      key[k] *= into;
      query[k] *= arguments.scale * query_norms[row] * into;
    }
    const int64_t to = static_cast<int64_t>(blockIdx.x) * kChunkTokens * kUnits + i;
    tile::store(static_cast<ptx::Word4*>(arguments.read_key) + to, tile::Vector<T>::pack(key));
    tile::store(static_cast<ptx::Word4*>(arguments.read_query) + to, tile::Vector<T>::pack(query));
    tile::store(static_cast<ptx::Word4*>(arguments.written_key) + to, tile::Vector<T>::pack(written));
  }
}

// Sums of gates where a fragment's elements are: two columns of a row, then 8 rows further, then both 8 columns
// further.
struct FragmentSums {
  float2 at[4];
};
template <int kWidth>
__device__ __forceinline__ FragmentSums fragment_sums(const float* sums, int low_row, int high_row, int column) {
  FragmentSums result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2 == 0 ? low_row : high_row;
    result.at[i] =
        *reinterpret_cast<const float2*>(sums + row * sums_pitch(kWidth) + column + i / 2 * 8 + threadIdx.x % 4 * 2);
  }
  return result;
}
// sign (own - middle), as a power.
struct Powers {
  float2 at[4];
};
__device__ __forceinline__ Powers powers_of(const FragmentSums& own, const FragmentSums& middle, float low_sign,
                                            float high_sign) {
  Powers result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sign = i % 2 == 0 ? low_sign : high_sign;
    result.at[i].x = ptx::ex2_approx_ftz_f32(sign * (own.at[i].x - middle.at[i].x));
    result.at[i].y = ptx::ex2_approx_ftz_f32(sign * (own.at[i].y - middle.at[i].y));
  }
  return result;
}
template <class T>
__device__ __forceinline__ void scale_fragment(const uint32_t (&words)[4], const Powers& powers,
                                               uint32_t (&scaled)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[2];
    tile::Word<T>::unpack(words[i], pair);
    pair[0] *= powers.at[i].x;
    pair[1] *= powers.at[i].y;
    scaled[i] = tile::Word<T>::pack(pair);
  }
}
// sums += a b^T of 16 x 16 elements; a first operand's words are a second one's, in another order.
template <class T>
__device__ __forceinline__ void multiply_turned(float (&sums)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  tile::multiply_fragments<T>(sums[0], a, b[0], b[2]);
  tile::multiply_fragments<T>(sums[1], a, b[1], b[3]);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_channels(const __grid_constant__ PrepareArguments arguments) {
  constexpr int kPitch = prepared_row_bytes(kWidth), kTileBytes = kChunkTokens * kPitch, kLevels = 4;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float beta[kChunkTokens], key_norms[kChunkTokens], query_norms[kChunkTokens], parts[kPrepareThreads];
  float* sums = reinterpret_cast<float*>(memory + 2 * kSystemBytes);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.x % arguments.heads);
  const ChunkPlace place = place_of_slot(arguments, blockIdx.x / arguments.heads);
  if (place.count == 0) return;
  const uint32_t keys = ptx::shared_address(memory), queries = keys + kTileBytes;
  load_rows<T, kWidth>(arguments.key, place, head, arguments.columns, keys);
  load_rows<T, kWidth>(arguments.query, place, head, arguments.columns, queries);
  ptx::cp_async_commit_group();
  sum_channel_gates<T, kWidth>(arguments, place, head, sums);
  if (thread < kChunkTokens) {
    beta[thread] =
        thread < place.count ? element_of<T>(arguments.beta, place.batch, place.first + thread, head, 0) : 0.0f;
    key_norms[thread] = query_norms[thread] = 1;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  if (arguments.normalizes) {
    inverse_norms<T, kWidth, kPrepareThreads>(memory, parts, key_norms);
    inverse_norms<T, kWidth, kPrepareThreads>(memory + kTileBytes, parts, query_norms);
  }
  store_rows<T, kWidth>(arguments, memory, memory + kTileBytes, sums, key_norms, query_norms);
  if (thread < kWidth) {
    arguments.factors[static_cast<int64_t>(blockIdx.x) * kFactors + kKept + thread] =
        ptx::ex2_approx_ftz_f32(sums[(kChunkTokens - 1) * sums_pitch(kWidth) + thread]);
  }

  // [0] of keys, [1] of queries.
  float front[2][3][2][4] = {}, among[2][kLevels][2][4] = {}, same[2][4] = {};
  const int own = 16 * warp, low = lane / 4;
#pragma unroll 1
  for (int column = 0; column < kWidth; column += 16) {
    uint32_t key_rows[4], query_rows[4], scaled_keys[4], scaled_queries[4];
    load_fragment<false, kPitch>(key_rows, keys, own, column);
    load_fragment<false, kPitch>(query_rows, queries, own, column);
    const FragmentSums own_sums = fragment_sums<kWidth>(sums, own + low, own + low + 8, column);
    multiply_turned<T>(same, query_rows, key_rows);
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const int bit = 8 >> level, low_middle = low / (2 * bit) * 2 * bit + bit;
      const int high_middle = (low + 8) / (2 * bit) * 2 * bit + bit;
      const FragmentSums middle = fragment_sums<kWidth>(sums, own + low_middle, own + high_middle, column);
      const Powers powers =
          powers_of(own_sums, middle, (low & bit) != 0 ? 1.0f : -1.0f, ((low + 8) & bit) != 0 ? 1.0f : -1.0f);
      scale_fragment<T>(key_rows, powers, scaled_keys);
      scale_fragment<T>(query_rows, powers, scaled_queries);
      multiply_turned<T>(among[0][level], scaled_keys, scaled_keys);
      multiply_turned<T>(among[1][level], scaled_queries, scaled_keys);
    }
    if (warp == 0) continue;
    const FragmentSums first = fragment_sums<kWidth>(sums, own, own, column);
    const Powers behind = powers_of(own_sums, first, 1.0f, 1.0f);
    scale_fragment<T>(key_rows, behind, scaled_keys);
    scale_fragment<T>(query_rows, behind, scaled_queries);
#pragma unroll
    for (int block = 0; block < 3; ++block) {
      if (block >= warp) continue;
      uint32_t others[4];
      load_fragment<false, kPitch>(others, keys, 16 * block, column);
      const FragmentSums their = fragment_sums<kWidth>(sums, 16 * block + low, 16 * block + low + 8, column);
      scale_fragment<T>(others, powers_of(their, first, -1.0f, -1.0f), others);
      multiply_turned<T>(front[0][block], scaled_keys, others);
      multiply_turned<T>(front[1][block], scaled_queries, others);
    }
  }
  __syncthreads();  // keys and queries are read

  System& system = *reinterpret_cast<System*>(memory);
  System& inverse = *reinterpret_cast<System*>(memory + kSystemBytes);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t words[4] = {};
    if (block <= warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          float weights[2];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int row = low + i / 2 * 8, column = 8 * half + lane % 4 * 2 + k, at = i + k;
            const int t = own + row, s = 16 * block + column, difference = row ^ column;
            float of_keys = 0, of_queries = 0;
            if (block < warp) {
              of_keys = front[0][block % 3][half][at];
              of_queries = front[1][block % 3][half][at];
            } else if (row == column) {
              of_queries = same[half][at];
            } else if (column < row) {
              const int level = difference >= 8 ? 0 : difference >= 4 ? 1 : difference >= 2 ? 2 : 3;
              of_keys = level == 0   ? among[0][0][half][at]
                        : level == 1 ? among[0][1][half][at]
                        : level == 2 ? among[0][2][half][at]
                                     : among[0][3][half][at];
              of_queries = level == 0   ? among[1][0][half][at]
                           : level == 1 ? among[1][1][half][at]
                           : level == 2 ? among[1][2][half][at]
                                        : among[1][3][half][at];
            }
            system[t][s] = beta[t] * key_norms[t] * key_norms[s] * of_keys;
            weights[k] = arguments.scale * query_norms[t] * key_norms[s] * of_queries;
          }
          words[half * 2 + i / 2] = tile::Word<T>::pack(weights);
        }
      }
    }
    store_fragment(arguments.weights, block, words);
  }
  __syncthreads();
  invert(system, inverse);
  __syncthreads();
  store_matrix<T>(inverse, beta, arguments.matrices);
}

}  // namespace kernel_pytorch::linear_attention::delta
