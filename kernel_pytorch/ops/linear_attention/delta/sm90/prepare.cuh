// What the chunks of the delta rule need besides the state, for no gate and for one gate of each token (chunk_cuda.h):
// a block takes one chunk of one head. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/ops/linear_attention/delta/sm90/system.cuh"

namespace kernel_pytorch::linear_attention::delta {

inline constexpr float kNormFloor = 1e-6f;

// Rows of a chunk into shared memory, zeros behind its end and behind the columns.
template <class T, int kWidth, int kThreads = kPrepareThreads>
__device__ __forceinline__ void load_rows(const ScanTensor& from, const ChunkPlace& place, int head, int columns,
                                          uint32_t to) {
  constexpr int kUnits = kWidth / 8;
  for (int i = threadIdx.x; i < kChunkTokens * kUnits; i += kThreads) {
    const int row = i / kUnits, unit = i % kUnits;
    const bool is_there = row < place.count && unit * 8 < columns;
    const T* source =
        row_of<T>(from, place.batch, place.first + (is_there ? row : 0), head) + (is_there ? unit * 8 : 0);
    ptx::cp_async_cg_shared_global_16_fill(to + row * prepared_row_bytes(kWidth) + unit * 16, source,
                                           is_there ? 16 : 0);
  }
}

// Sums of one gate of each token, in base 2, by one warp; gates behind the end are none.
template <class T, class Arguments>
__device__ __forceinline__ void sum_gates(const Arguments& arguments, const ChunkPlace& place, int head,
                                          float (&sums)[kChunkTokens]) {
  const int lane = threadIdx.x % 32;
  float gates[2] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (arguments.gate.data == nullptr || 2 * lane + k >= place.count) continue;
    gates[k] = finite_gate(element_of<T>(arguments.gate, place.batch, place.first + 2 * lane + k, head, 0)) * kLog2OfE;
  }
  float sum = gates[0] + gates[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  sums[2 * lane] = sum - gates[1];
  sums[2 * lane + 1] = sum;
}

// 1 / the norm of each row of a tile, by several threads a row: each has a run of columns.
template <class T, int kWidth, int kThreads>
__device__ __forceinline__ void inverse_norms(const unsigned char* tile, float (&parts)[kThreads],
                                              float (&inverses)[kChunkTokens]) {
  constexpr int kParts = kThreads / kChunkTokens;
  const int row = threadIdx.x % kChunkTokens, part = threadIdx.x / kChunkTokens;
  const unsigned char* from = tile + row * prepared_row_bytes(kWidth) + part * (kWidth * 2 / kParts);
  float sum = 0;
#pragma unroll
  for (int unit = 0; unit < kWidth / 8 / kParts; ++unit) {
    float numbers[8];
    tile::Vector<T>{*reinterpret_cast<const ptx::Word4*>(from + unit * 16)}.unpack(numbers);
#pragma unroll
    for (const float number : numbers) sum += number * number;
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int other = 1; other < kParts; ++other) sum += parts[threadIdx.x + other * kChunkTokens];
    inverses[row] = 1.0f / sqrtf(sum + kNormFloor);
  }
  __syncthreads();
}

// P^T, rounded, of P in fp32.
template <class T>
__device__ __forceinline__ void store_turned(const System& from, void* matrices) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8, column = 16 * step + i / 2 * 8 + lane % 4 * 2;
      float pair[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) pair[k] = column + k >= row ? from[column + k][row] : 0.0f;
      words[i] = tile::Word<T>::pack(pair);
    }
    store_fragment(matrices, step, words);
  }
}

// kForGradient: A' has the beta of its column, A'_ts = key_t key_s e^(G_t - G_s) beta_s, so that its inverse N gives
// the errors that betas are multiplied with, and nothing is ever divided by a beta.
template <class T, int kWidth, bool kForGradient>
__global__ void __launch_bounds__(kPrepareThreads) prepare_chunks(const __grid_constant__ PrepareArguments arguments) {
  constexpr int kPitch = prepared_row_bytes(kWidth), kTileBytes = kChunkTokens * kPitch;
  static_assert(2 * kTileBytes <= 2 * kSystemBytes, "the system lies where the tiles were");
  __shared__ __align__(16) unsigned char memory[2 * kSystemBytes];
  __shared__ float sums[kChunkTokens], beta[kChunkTokens], key_norms[kChunkTokens], query_norms[kChunkTokens];
  __shared__ float parts[kPrepareThreads];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.x % arguments.heads);
  const ChunkPlace place = place_of_slot(arguments, blockIdx.x / arguments.heads);
  if (place.count == 0) return;
  const uint32_t keys = ptx::shared_address(memory), queries = keys + kTileBytes;
  load_rows<T, kWidth>(arguments.key, place, head, arguments.columns, keys);
  load_rows<T, kWidth>(arguments.query, place, head, arguments.columns, queries);
  ptx::cp_async_commit_group();
  if (warp == 0) sum_gates<T>(arguments, place, head, sums);
  if (thread >= kChunkTokens) {
    const int row = thread - kChunkTokens;
    beta[row] = row < place.count ? element_of<T>(arguments.beta, place.batch, place.first + row, head, 0) : 0.0f;
    key_norms[row] = query_norms[row] = 1;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  if (arguments.normalizes) {
    inverse_norms<T, kWidth, kPrepareThreads>(memory, parts, key_norms);
    inverse_norms<T, kWidth, kPrepareThreads>(memory + kTileBytes, parts, query_norms);
  }

  // Blocks of 16 columns up to the diagonal.
  float of_keys[8][4] = {}, of_queries[8][4] = {};
#pragma unroll
  for (int column = 0; column < kWidth; column += 16) {
    uint32_t key_rows[4], query_rows[4];
    load_fragment<false, kPitch>(key_rows, keys, 16 * warp, column);
    load_fragment<false, kPitch>(query_rows, queries, 16 * warp, column);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > warp) continue;
      uint32_t others[4];
      load_fragment<true, kPitch>(others, keys, 16 * block, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tile::multiply_fragments<T>(of_keys[2 * block + half], key_rows, others[2 * half], others[2 * half + 1]);
        tile::multiply_fragments<T>(of_queries[2 * block + half], query_rows, others[2 * half], others[2 * half + 1]);
      }
    }
  }
  __syncthreads();  // the tiles are read

  System& system = *reinterpret_cast<System*>(memory);
  System& inverse = *reinterpret_cast<System*>(memory + kSystemBytes);
  const int first_row = 16 * warp + lane / 4;
#pragma unroll
  for (int group = 0; group < 8; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = first_row + i / 2 * 8, s = 8 * group + lane % 4 * 2 + i % 2;
      const float factor = s <= t ? key_norms[s] * ptx::ex2_approx_ftz_f32(sums[t] - sums[s]) : 0.0f;
      system[t][s] = s < t ? beta[kForGradient ? s : t] * key_norms[t] * factor * of_keys[group][i] : 0.0f;
      of_queries[group][i] = s <= t ? arguments.scale * query_norms[t] * factor * of_queries[group][i] : 0.0f;
    }
  }
  if constexpr (kForGradient) {
#pragma unroll
    for (int group = 0; group < 8; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        inverse[first_row + i / 2 * 8][8 * group + lane % 4 * 2 + i % 2] = of_queries[group][i];
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = tile::Word<T>::pack(of_queries[2 * step + i / 2] + i % 2 * 2);
      store_fragment(arguments.weights, step, words);
    }
  }
  const float last = sums[kChunkTokens - 1];
  float* factors = arguments.factors + static_cast<int64_t>(blockIdx.x) * kFactors;
  if (thread < kChunkTokens) {
    const float into = ptx::ex2_approx_ftz_f32(sums[thread]);
    factors[kReadKeys + thread] = key_norms[thread] * into;
    factors[kReadQueries + thread] = arguments.scale * query_norms[thread] * into;
    factors[kWrittenKeys + thread] = key_norms[thread] * ptx::ex2_approx_ftz_f32(last - sums[thread]);
    factors[kBetas + thread] = beta[thread];
  }
  factors[kKept + thread] = ptx::ex2_approx_ftz_f32(last);
  __syncthreads();
  if constexpr (kForGradient) {
    store_turned<T>(inverse, arguments.weights);
    if (thread < kChunkTokens) beta[thread] = 1;
    __syncthreads();
  }
  invert(system, inverse);
  __syncthreads();
  store_matrix<T>(inverse, beta, arguments.matrices);
  if constexpr (kForGradient) store_turned<T>(inverse, arguments.turned_matrices);
}

}  // namespace kernel_pytorch::linear_attention::delta
