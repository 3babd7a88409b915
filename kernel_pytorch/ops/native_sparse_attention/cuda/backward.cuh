// Backward in two passes, without atomics: of a token (gradients of its queries and gates, and the sum of P * dP of
// each branch), as the forward goes, each branch twice; then of a tile of keys, over all queries that may see one of
// them in their order. Probabilities are computed again from the logarithms of their sums.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda/common.cuh"

namespace kernel_pytorch::native_sparse_attention {

struct BackwardMemory {
  float *query, *grad_query, *grad_output, *scores, *differences, *deltas;
  int32_t* rows;

  __device__ __forceinline__ BackwardMemory(const Arguments& a, float* shared) {
    query = shared;
    grad_query = query + a.group * a.size;
    grad_output = grad_query + a.group * a.size;
    scores = grad_output + a.group * a.value_size;
    differences = scores + a.group * kChunk;
    deltas = differences + a.group * kChunk;
    rows = reinterpret_cast<int32_t*>(deltas + a.group);
  }
};

// P and dP of a chunk of rows for every head, of rows that are none 0.
template <class C, class Seen>
__device__ __forceinline__ void score_chunk(const Arguments& a, const BackwardMemory& memory, const Group& at,
                                            const Rows& keys, const Rows& values, const Seen& seen, int32_t base,
                                            int branch) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t row = base + thread < seen.count ? seen.row(base + thread) : -1;
  memory.rows[thread] = row;
  dot_row<C>(a, memory.query, a.size, row < 0 ? nullptr : row_at<C>(keys, at.batch, row, at.key_head), 0.0f,
             memory.scores);
  dot_row<C>(a, memory.grad_output, a.value_size, row < 0 ? nullptr : row_at<C>(values, at.batch, row, at.key_head),
             0.0f, memory.differences);
  for (int32_t h = 0; h < a.group; ++h) {  // this thread's own
    const int64_t head = static_cast<int64_t>(at.batch) * a.heads + at.key_head * a.group + h;
    const float lse = a.lse[branch][head * a.queries + at.token];
    float& score = memory.scores[h * kChunk + thread];
    score = row < 0 ? 0.0f : expf(score - lse);
  }
  __syncthreads();
}

template <class T, class C, class Seen>
__device__ __forceinline__ void differentiate(const Arguments& a, const BackwardMemory& memory, const Group& at,
                                              const Rows& keys, const Rows& values, const Seen& seen, int branch) {
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int32_t h = thread; h < a.group; h += kThreads) memory.deltas[h] = 0;
  __syncthreads();
  for (int32_t base = 0; base < seen.count; base += kChunk) {
    score_chunk<C>(a, memory, at, keys, values, seen, base, branch);
    for (int32_t h = warp; h < a.group; h += kThreads / 32) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kChunk; k += 32) {
        sum += memory.scores[h * kChunk + k + lane] * memory.differences[h * kChunk + k + lane];
      }
      sum = tile::sum_lanes<32>(sum);
      if (lane == 0) memory.deltas[h] += sum;
    }
    __syncthreads();
  }
  for (int32_t base = 0; base < seen.count; base += kChunk) {
    score_chunk<C>(a, memory, at, keys, values, seen, base, branch);
    for (int32_t h = 0; h < a.group; ++h) {
      const float gate = gate_at<T>(a.gates[branch], at.batch, at.token, at.key_head * a.group + h);
      float& difference = memory.differences[h * kChunk + thread];
      difference = gate * memory.scores[h * kChunk + thread] * (difference - memory.deltas[h]);
    }
    __syncthreads();
    const int32_t count = min(kChunk, seen.count - base);
    for (int32_t i = thread; i < a.group * a.size; i += kThreads) {
      float sum = memory.grad_query[i];
      for (int32_t k = 0; k < count; ++k) {
        if (memory.rows[k] < 0) continue;
        sum += memory.differences[i / a.size * kChunk + k] *
               tile::to_float(row_at<C>(keys, at.batch, memory.rows[k], at.key_head)[i % a.size]);
      }
      memory.grad_query[i] = sum;
    }
    __syncthreads();
  }
  for (int32_t h = thread; h < a.group; h += kThreads) {
    const int64_t head = static_cast<int64_t>(at.batch) * a.heads + at.key_head * a.group + h;
    a.deltas[branch][head * a.queries + at.token] = memory.deltas[h];
    store_gate<T>(a.grad_gates[branch], at.batch, at.token, at.key_head * a.group + h, memory.deltas[h]);
  }
  __syncthreads();
}

template <class T, class C>
__global__ void __launch_bounds__(kThreads, kBlocks) backward_query(const __grid_constant__ Arguments a) {
  extern __shared__ float shared[];
  const BackwardMemory memory(a, shared);
  const Group at(a);
  const Place place = place_of(a, at.token);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  load_heads<T>(a, a.query, at, a.size, a.scale, memory.query);
  load_heads<T>(a, a.grad_output, at, a.value_size, 1.0f, memory.grad_output);
  for (int32_t i = thread; i < a.group * a.size; i += kThreads) memory.grad_query[i] = 0;
  __syncthreads();
  if (place.place >= 0) {
    if (a.gates[0].data != nullptr) {
      const Range seen{place.compressed_begin, compressed_before(a, place.place + 1)};
      differentiate<T, C>(a, memory, at, a.compressed_key, a.compressed_value, seen, 0);
    }
    if (a.gates[1].data != nullptr) {
      const int64_t list_at = (static_cast<int64_t>(at.batch) * a.queries + at.token) * a.key_heads + at.key_head;
      const Listed seen{a.lists + list_at * a.list_length, a.block_size, place.place, place.key_begin,
                        a.list_length * a.block_size};
      differentiate<T, T>(a, memory, at, a.key, a.value, seen, 1);
    }
    if (a.gates[2].data != nullptr) {
      const int32_t first = max(place.place - a.window + 1, 0);
      differentiate<T, T>(a, memory, at, a.key, a.value, Range{place.key_begin + first, place.place + 1 - first}, 2);
    }
  }
  for (int branch = 0; place.place < 0 && branch < kBranches; ++branch) {
    for (int32_t h = thread; h < a.group; h += kThreads) {
      store_gate<T>(a.grad_gates[branch], at.batch, at.token, at.key_head * a.group + h, 0.0f);
    }
  }
  for (int32_t i = thread; i < a.group * a.size; i += kThreads) {
    T* row = result_at<T>(a.grad_query, at.batch, at.token, at.key_head * a.group + i / a.size);
    row[i % a.size] = tile::from_float<T>(memory.grad_query[i] * a.scale);
  }
}

struct TileMemory {
  float *keys, *values, *grad_keys, *grad_values, *shares, *differences;
  int32_t *times, *is_near;  // how often a query's list has each row, and whether its range has it

  __device__ __forceinline__ TileMemory(const Arguments& a, float* shared) {
    keys = shared;
    values = keys + kTileRows * a.size;
    grad_keys = values + kTileRows * a.value_size;
    grad_values = grad_keys + kTileRows * a.size;
    shares = grad_values + kTileRows * a.value_size;
    differences = shares + kTileHeads * kTileRows;
    times = reinterpret_cast<int32_t*>(differences + kTileHeads * kTileRows);
    is_near = times + kTileRows;
  }
};

// Rows of the tile that a query sees, a thread of the first warp for each. Whether there is any.
template <bool kCompressed>
__device__ __forceinline__ bool find_seen(const Arguments& a, const TileMemory& memory, int32_t batch, int32_t key_head,
                                          int32_t first_row, int32_t rows, int32_t token) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  bool is_seen = false;
  if (thread < kTileRows) {
    const Place place = place_of(a, token);
    int32_t times = 0, is_near = 0;
    if (place.place >= 0 && thread < rows) {
      if constexpr (kCompressed) {
        const int32_t own = first_row + thread - place.compressed_begin;
        is_near = own >= 0 && own < compressed_before(a, place.place + 1);
      } else {
        const int32_t key = first_row + thread - place.key_begin;
        const bool is_past = key >= 0 && key <= place.place;
        is_near = a.gates[2].data != nullptr && is_past && key > place.place - a.window;
        if (a.gates[1].data != nullptr && is_past) {
          const int64_t list_at = (static_cast<int64_t>(batch) * a.queries + token) * a.key_heads + key_head;
          const int32_t block = key / a.block_size;
          for (int32_t i = 0; i < a.list_length; ++i) times += a.lists[list_at * a.list_length + i] == block;
        }
      }
    }
    memory.times[thread] = times;
    memory.is_near[thread] = is_near;
    is_seen = times != 0 || is_near != 0;
  }
  return __syncthreads_or(is_seen) != 0;
}

// One branch's share of a row and the gradient of its score.
template <class T>
__device__ __forceinline__ void add_branch(const Arguments& a, int branch, int32_t batch, int32_t token, int32_t head,
                                           float times, float score, float difference, float& share, float& gradient) {
  const int64_t at = (static_cast<int64_t>(batch) * a.heads + head) * a.queries + token;
  const float own = times * gate_at<T>(a.gates[branch], batch, token, head) * expf(score - a.lse[branch][at]);
  share += own;
  gradient += own * (difference - a.deltas[branch][at]);
}

// Gradients of the rows of one tile: of keys and values, or of compressed ones.
template <class T, class C, bool kCompressed>
__global__ void __launch_bounds__(kThreads, kBlocks) backward_keys(const __grid_constant__ Arguments a) {
  extern __shared__ float shared[];
  const TileMemory memory(a, shared);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t all_rows = kCompressed ? a.compressed : a.keys, tiles = (all_rows + kTileRows - 1) / kTileRows;
  const auto first_row = static_cast<int32_t>(blockIdx.x % tiles) * kTileRows;
  const auto key_head = static_cast<int32_t>(blockIdx.x / tiles % a.key_heads);
  const auto batch = static_cast<int32_t>(blockIdx.x / tiles / a.key_heads);
  const int32_t rows = min(kTileRows, all_rows - first_row);
  const Rows &keys = kCompressed ? a.compressed_key : a.key, &values = kCompressed ? a.compressed_value : a.value;
  const bool has_gates =
      kCompressed ? a.gates[0].data != nullptr : a.gates[1].data != nullptr || a.gates[2].data != nullptr;
  for (int32_t i = thread; i < kTileRows * a.size; i += kThreads) {
    memory.grad_keys[i] = 0;
    const bool is_read = has_gates && i / a.size < rows;
    memory.keys[i] =
        is_read ? tile::to_float(row_at<C>(keys, batch, first_row + i / a.size, key_head)[i % a.size]) : 0.0f;
  }
  for (int32_t i = thread; i < kTileRows * a.value_size; i += kThreads) {
    memory.grad_values[i] = 0;
    const bool is_read = has_gates && i / a.value_size < rows;
    memory.values[i] =
        is_read ? tile::to_float(row_at<C>(values, batch, first_row + i / a.value_size, key_head)[i % a.value_size])
                : 0.0f;
  }
  __syncthreads();
  // The first query that can see the tile's first row; without offsets tokens begin behind it.
  int32_t first_query = first_row;
  if constexpr (kCompressed) first_query = max(first_row - 1, 0) * a.compress_stride;
  if (a.offsets == nullptr) first_query = max(first_query - (a.keys - a.queries), 0);
#pragma unroll 1
  for (int32_t token = first_query; has_gates && token < a.queries; ++token) {
    if (!find_seen<kCompressed>(a, memory, batch, key_head, first_row, rows, token)) continue;
    for (int32_t base = 0; base < a.group; base += kTileHeads) {
      // A thread for each head and row.
      const int32_t row = thread % kTileRows, h = base + thread / kTileRows, head = key_head * a.group + h;
      float share = 0, gradient = 0;
      const int32_t times = memory.times[row], is_near = memory.is_near[row];
      if (h < a.group && (times != 0 || is_near != 0)) {
        const T* query = row_at<T>(a.query, batch, token, head);
        const T* grad_output = row_at<T>(a.grad_output, batch, token, head);
        float score = 0, difference = 0;
#pragma unroll 2
        for (int32_t i = 0; i < a.size; ++i) score += tile::to_float(query[i]) * memory.keys[row * a.size + i];
#pragma unroll 2
        for (int32_t i = 0; i < a.value_size; ++i) {
          difference += tile::to_float(grad_output[i]) * memory.values[row * a.value_size + i];
        }
        score *= a.scale;
        if (kCompressed) {
          add_branch<T>(a, 0, batch, token, head, 1.0f, score, difference, share, gradient);
        } else {
          if (times != 0) {
            add_branch<T>(a, 1, batch, token, head, static_cast<float>(times), score, difference, share, gradient);
          }
          if (is_near != 0) add_branch<T>(a, 2, batch, token, head, 1.0f, score, difference, share, gradient);
        }
      }
      memory.shares[thread] = share;
      memory.differences[thread] = gradient * a.scale;
      __syncthreads();
      const int32_t heads = min(kTileHeads, a.group - base);
#pragma unroll 1
      for (int32_t i = thread; i < kTileRows * a.size; i += kThreads) {
        float sum = memory.grad_keys[i];
#pragma unroll 1
        for (int32_t k = 0; k < heads; ++k) {
          sum += memory.differences[k * kTileRows + i / a.size] *
                 tile::to_float(row_at<T>(a.query, batch, token, key_head * a.group + base + k)[i % a.size]);
        }
        memory.grad_keys[i] = sum;
      }
#pragma unroll 1
      for (int32_t i = thread; i < kTileRows * a.value_size; i += kThreads) {
        float sum = memory.grad_values[i];
#pragma unroll 1
        for (int32_t k = 0; k < heads; ++k) {
          sum +=
              memory.shares[k * kTileRows + i / a.value_size] *
              tile::to_float(row_at<T>(a.grad_output, batch, token, key_head * a.group + base + k)[i % a.value_size]);
        }
        memory.grad_values[i] = sum;
      }
      __syncthreads();
    }
  }
  __syncthreads();
  const auto write = [&](const float* sums, const Rows& to, const Rows& means, int32_t size) {
#pragma unroll 1
    for (int32_t i = thread; to.data != nullptr && i < rows * size; i += kThreads) {
      const int32_t row = first_row + i / size, column = i % size;
      float sum = sums[i];
      if constexpr (kCompressed) {
        result_at<C>(to, batch, row, key_head)[column] = tile::from_float<C>(sum);
        continue;
      }
      if (a.adds_means) {
        // The means that this key is part of.
        const Place place = a.offsets == nullptr ? Place{row, 0, 0} : place_of(a, row);
        const int32_t end = a.offsets == nullptr
                                ? compressed_before(a, a.keys)
                                : compressed_before(a, static_cast<int32_t>(end_of(a, row)) - place.key_begin);
        const int32_t spans = a.compress_block / a.compress_stride, last = place.place / a.compress_stride;
        float from_means = 0;
        for (int32_t c = max(last - spans + 1, 0); place.place >= 0 && c <= last && c < end; ++c) {
          from_means += row_at<float>(means, batch, place.compressed_begin + c, key_head)[column];
        }
        sum += from_means / static_cast<float>(a.compress_block);
      }
      result_at<T>(to, batch, row, key_head)[column] = tile::from_float<T>(sum);
    }
  };
  if constexpr (kCompressed) {
    write(memory.grad_keys, a.grad_compressed_key, {}, a.size);
    write(memory.grad_values, a.grad_compressed_value, {}, a.value_size);
  } else {
    write(memory.grad_keys, a.grad_key, a.grad_compressed_key, a.size);
    write(memory.grad_values, a.grad_value, a.grad_compressed_value, a.value_size);
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
