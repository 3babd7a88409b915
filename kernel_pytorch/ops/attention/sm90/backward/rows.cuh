// What stands before and after the main kernel of the backward, bound by memory: records of lse and delta with zeroed
// sums, and the sums of grad_query on their way into its type and strides. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/place.cuh"

namespace kernel_pytorch::attention {

// delta of each query of a tile, into the lower lane of 16.
template <class T, int kRows, int kVectors>
__device__ __forceinline__ void tile_deltas(float (&deltas)[kRows], const PrepareArguments& arguments,
                                            const QueryTilePlace& place, int first_query) {
  constexpr int kGroups = kPrepareThreads / 16;
  const int lane = threadIdx.x % 16;
  const T* output = static_cast<const T*>(arguments.output.data) + place.memory_batch * arguments.output.batch +
                    place.head * arguments.output.head;
  const T* grad = static_cast<const T*>(arguments.grad_output.data) + place.memory_batch * arguments.grad_output.batch +
                  place.head * arguments.grad_output.head;
  tile::Vector<T> outputs[kRows][kVectors], grads[kRows][kVectors];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = first_query + i * kGroups + threadIdx.x / 16;
    const int64_t row = place.first_query + query;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = (v * 16 + lane) * 8;
      const bool wanted = query < place.queries && column < arguments.columns;
      outputs[i][v] = tile::load_once_if<T>(wanted, output + row * arguments.output.row + column);
      grads[i][v] = tile::load_once_if<T>(wanted, grad + row * arguments.grad_output.row + column);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[8], y[8];
      outputs[i][v].unpack(x);
      grads[i][v].unpack(y);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum = fmaf(x[e], y[e], sum);
    }
    deltas[i] = tile::sum_lanes<16>(sum);
  }
}

// A block a tile of kQueries; a value has up to kVectors times 128 columns.
template <class T, int kQueries, int kVectors, bool kPacked>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare(const __grid_constant__ PrepareArguments arguments) {
  constexpr int kGroups = kPrepareThreads / 16;
  constexpr int kRows = kQueries / kGroups;
  __shared__ __align__(16) float record[2 * kQueries];
  __shared__ float sinks[kQueries];
  const QueryTilePlace place = query_tile_place<kPacked>(arguments.score, arguments.tiles, blockIdx.x, kQueries);
  const int first_query = place.tile * kQueries;
  const int section_tiles = arguments.zeroed.section_units * arguments.score.group * arguments.tiles.tiles;
  const int section = static_cast<int>(blockIdx.x) / section_tiles;
  if (threadIdx.x == 0 && static_cast<int>(blockIdx.x) == section * section_tiles) arguments.zeroed.counts[section] = 0;
  if (first_query >= place.queries) {
    if (threadIdx.x == 0 && arguments.sink_sums != nullptr) arguments.sink_sums[blockIdx.x] = 0;
    return;
  }
  float deltas[kRows];
  tile_deltas<T, kRows, kVectors>(deltas, arguments, place, first_query);
  const int64_t head_row = place.row_of_heads + place.first_query;
  if (threadIdx.x % 16 == 0) {
    const float sink =
        arguments.sink_sums != nullptr ? arguments.score.sinks[place.head * arguments.score.sinks_stride] * kLog2e : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = i * kGroups + threadIdx.x / 16;
      const int query = first_query + at;
      float bound = -__int_as_float(0x7f800000), delta = 0;
      if (query < place.queries) {
        const float lse = arguments.lse[head_row + query] * kLog2e;
        if (lse != -__int_as_float(0x7f800000)) {
          bound = -lse;
          delta = deltas[i];
          if (arguments.grad_lse != nullptr) delta -= arguments.grad_lse[head_row + query];
        }
      }
      record[record_place(at)] = bound + kExponent<T>;
      record[kQueries + record_place(at)] = -delta;
      sinks[at] = -delta * ptx::ex2_approx_ftz_f32(sink + bound);
    }
  }
  __syncthreads();
  const int64_t tile = blockIdx.x;
  if (threadIdx.x < kQueries / 2) {
    tile::store(arguments.records + tile * (2 * kQueries) + threadIdx.x * 4,
                tile::load_from_shared<float>(ptx::shared_address(record + threadIdx.x * 4)));
  }
  if (section < arguments.zeroed.sections_ahead) {
    float* sums = arguments.grad_query_sums + tile * (kQueries * arguments.sum_columns);
#pragma unroll 8
    for (int i = threadIdx.x * 4; i < kQueries * arguments.sum_columns; i += kPrepareThreads * 4) {
      tile::store(sums + i, tile::Vector<float>::zero());
    }
  }
  if (threadIdx.x == 0 && arguments.turns != nullptr) arguments.turns[tile] = 0;
  if (arguments.sink_sums != nullptr && threadIdx.x < 32) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kQueries; i += 32) sum += sinks[i + threadIdx.x];
    sum = tile::sum_lanes<32>(sum);
    if (threadIdx.x == 0) arguments.sink_sums[tile] = sum;
  }
}

// A block a head: the tiles' sums in a fixed order.
__global__ void __launch_bounds__(kSinkThreads) backward_sinks(const __grid_constant__ SinkArguments arguments) {
  using Sum = tile::BlockSum<kSinkThreads / 32, 1>;
  __shared__ Sum::Storage storage;
  float sum[1] = {0};
  for (int batch = 0; batch < arguments.batches; ++batch) {
    const float* sums = arguments.sums + (static_cast<int64_t>(batch) * arguments.heads + blockIdx.x) * arguments.tiles;
    for (int i = threadIdx.x; i < arguments.tiles; i += kSinkThreads) sum[0] += sums[i];
  }
  Sum(storage).sum(sum);
  if (threadIdx.x == 0) arguments.grad_sinks[blockIdx.x * arguments.stride] = sum[0];
}

// The query of a tile of 64 that row lane / 4 + 8 * half of a warp's accumulators of dQ stands for: store_scores
// permutes them, wide heads do not.
template <bool kIsWide>
__device__ __forceinline__ int sum_query(int warp, int lane, int half) {
  if constexpr (kIsWide) return warp * 16 + lane / 4 + 8 * half;
  return (lane / 4 + 8 * half) / 2 * 8 + warp * 2 + lane / 4 % 2;
}

// Rows in fp32, as accumulators hold them.
template <bool kIsWide, int kUnits>
__device__ __forceinline__ void finish_floats(const tile::Vector<float> (&sums)[kUnits], float scale, float* output,
                                              int64_t row_stride, int queries, int columns, bool adds) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = sum_query<kIsWide>(warp, lane, half);
    float* const at = output + query * row_stride + lane % 4 * 2;
    float others[kUnits][2];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      ptx::ld_global_v2_f32_if(adds && query < queries && 8 * i < columns, others[i][0], others[i][1], at + 8 * i);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float values[4];
      sums[i].unpack(values);
      ptx::st_global_v2_f32_if(query < queries && 8 * i < columns, at + 8 * i,
                               fmaf(values[2 * half], scale, others[i][0]),
                               fmaf(values[2 * half + 1], scale, others[i][1]));
    }
  }
}

// A block 64 queries of a tile, kColumns the columns of a tile of sums. Result: T, or float.
template <class T, class Result, int kQueries, int kColumns, bool kPacked>
__global__ void __launch_bounds__(kFinishThreads) backward_finish(const __grid_constant__ FinishArguments arguments) {
  constexpr int kUnits = kColumns / 8;
  constexpr int kRowWords = (kColumns + 63) / 64 * 32;
  __shared__ __align__(16) uint32_t rows[64 * kRowWords];
  const unsigned block = gridDim.x - 1 - blockIdx.x;  // the last sums may be in the cache still
  const int64_t tile = block / (kQueries / 64);
  const int part = block % (kQueries / 64);
  const QueryTilePlace place =
      query_tile_place<kPacked>(arguments.score, arguments.tiles, static_cast<int>(tile), kQueries);
  const int first_query = place.tile * kQueries + part * 64;
  if (first_query >= place.queries) return;
  tile::wait_for_earlier_kernels();
  const float* sums = arguments.grad_query_sums + (tile * kQueries + part * 64) * kColumns + threadIdx.x * 4;
  tile::Vector<float> loaded[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) loaded[i] = tile::load_once<float>(sums + i * 512);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = arguments.score.scale * kUnscale<T>;
  Result* output = static_cast<Result*>(arguments.grad_query.data) + place.memory_batch * arguments.grad_query.batch +
                   place.head * arguments.grad_query.head +
                   (place.first_query + first_query) * arguments.grad_query.row;
  const int queries = least(64, place.queries - first_query);
  if constexpr (sizeof(Result) == 4) {
    finish_floats<(kColumns > 128)>(loaded, scale, output, arguments.grad_query.row, queries, arguments.columns,
                                    arguments.accumulates);
    return;
  }
  // 16-byte units of a row change places so that neither the words below nor the rows after them collide.
  const auto place_of = [](int query, int unit) {
    return query * kRowWords + (unit / 8 * 8 + (unit % 8 ^ query / 8 ^ query % 2 * 4)) * 4;
  };
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    float values[4];
    loaded[i].unpack(values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float pair[2] = {values[2 * half] * scale, values[2 * half + 1] * scale};
      rows[place_of(sum_query<(kColumns > 128)>(warp, lane, half), i) + lane % 4] = tile::Word<T>::pack(pair);
    }
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < 64 * kUnits; i += kFinishThreads) {
    const int query = i / kUnits, unit = i % kUnits;
    if (query < queries && unit * 8 < arguments.columns) {
      const uint32_t source = ptx::shared_address(rows + place_of(query, unit));
      tile::store(reinterpret_cast<T*>(output) + query * arguments.grad_query.row + unit * 8,
                  tile::load_from_shared<T>(source));
    }
  }
}

}  // namespace kernel_pytorch::attention
