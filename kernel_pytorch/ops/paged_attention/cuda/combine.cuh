// What follows the workers: the pieces of segments that were cut, and tokens of nobody.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/work.cuh"

namespace kernel_pytorch::paged_attention {

// Tokens past the last request.
template <class Element>
__device__ __forceinline__ void clear_rest(const AttendArguments& arguments) {
  if (arguments.cu_seqlens_q == nullptr) return;
  const int32_t first = max(0, arguments.cu_seqlens_q[arguments.requests]);
  for (int32_t token = first + static_cast<int32_t>(blockIdx.x); token < arguments.tokens; token += gridDim.x) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < arguments.heads * arguments.value_size;
         i += kCombineThreads) {
      const int32_t head = i / arguments.value_size, column = i % arguments.value_size;
      static_cast<Element*>(
          arguments.output)[token * arguments.output_token_stride + head * arguments.output_head_stride + column] =
          tile::from_float<Element>(0.0f);
      if (column == 0 && arguments.lse != nullptr) {
        arguments.lse[head * arguments.tokens + token] = tile::minus_infinity();
      }
    }
  }
}

// The pieces of a segment that was cut, in order.
template <Tile kTile>
struct Pieces {
  static constexpr int kAllRows = kTile.heads * tile_rows(kTile), kFloats = kAllRows * (kTile.value_size + 2);
  const float* first;  // may lie behind the one that its worker goes on with; all others are one after another
  const float* others;
  int64_t distance;
  int32_t count;

  __device__ __forceinline__ const float* at(int32_t i) const { return i == 0 ? first : others + (i - 1) * distance; }
  __device__ __forceinline__ float largest(int32_t i, int32_t row) const {
    return at(i)[kAllRows * kTile.value_size + row];
  }
  __device__ __forceinline__ float sum(int32_t i, int32_t row) const {
    return at(i)[kAllRows * (kTile.value_size + 1) + row];
  }
  __device__ __forceinline__ const float4& values(int32_t i, int32_t row, int32_t column) const {
    return *reinterpret_cast<const float4*>(at(i) + row * kTile.value_size + column);
  }
};

// One row, by kShare warps that take pieces in turns. `values` and `sums` are theirs.
template <class Element, Tile kTile, int kShare>
__device__ __forceinline__ void combine_row(const AttendArguments& arguments, const Pieces<kTile>& pieces, int32_t row,
                                            bool is_there, int32_t token, int32_t head, float4* values, float* sums) {
  const int32_t lane = threadIdx.x % 32, part = static_cast<int32_t>(threadIdx.x) / 32 % kShare;
  float largest = tile::minus_infinity();
  if (is_there) {
    for (int32_t i = lane; i < pieces.count; i += 32) largest = fmaxf(largest, pieces.largest(i, row));
  }
  largest = tile::max_lanes<32>(largest);
  const float base = largest == tile::minus_infinity() ? 0.0f : largest;
  for (int32_t first_column = 0; first_column < kTile.value_size; first_column += 128) {
    const int32_t column = first_column + 4 * lane;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float sum = 0.0f;
    if (is_there) {
#pragma unroll 4
      for (int32_t i = part; i < pieces.count; i += kShare) {
        const float weight = ptx::ex2_approx_ftz_f32(pieces.largest(i, row) - base);
        sum += weight * pieces.sum(i, row);
        if (column < kTile.value_size) {
          const float4 own = pieces.values(i, row, column);
          value.x += weight * own.x;
          value.y += weight * own.y;
          value.z += weight * own.z;
          value.w += weight * own.w;
        }
      }
    }
    if constexpr (kShare > 1) {
      values[part * 32 + lane] = value;
      if (lane == 0) sums[part] = sum;
      __syncthreads();
      value = values[lane];
      sum = sums[0];
#pragma unroll
      for (int i = 1; i < kShare; ++i) {
        const float4 own = values[i * 32 + lane];
        value.x += own.x;
        value.y += own.y;
        value.z += own.z;
        value.w += own.w;
        sum += sums[i];
      }
      __syncthreads();
    }
    if (!is_there || part != 0) continue;
    float factor;
    const float lse = finish_row(arguments, head, largest, sum, factor);
    if (column == 0 && arguments.lse != nullptr) arguments.lse[head * arguments.tokens + token] = lse;
    Element* output = static_cast<Element*>(arguments.output) + token * arguments.output_token_stride +
                      head * arguments.output_head_stride;
    const float all[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < arguments.value_size) output[column + i] = tile::from_float<Element>(all[i] * factor);
    }
  }
}

// The rows of a segment that this block takes: the workers at its cuts share them.
template <class Element, Tile kTile, int kShare>
__device__ __forceinline__ void combine_rows(const AttendArguments& arguments, const Segment& segment,
                                             const Pieces<kTile>& pieces, int32_t cut, float4* values, float* sums) {
  constexpr int kRows = tile_rows(kTile), kAtOnce = kCombineThreads / 32 / kShare;
  const int32_t heads = static_cast<int32_t>(arguments.group_divider.divisor), first_row = segment.row_tile * kRows;
  const int32_t rows = min(kRows, segment.request.queries * heads - first_row), all = rows * kTile.heads;
  const int32_t own = static_cast<int32_t>(threadIdx.x) / 32 / kShare;
  for (int32_t first = cut * kAtOnce; first < all; first += (pieces.count - 1) * kAtOnce) {
    const int32_t index = first + own, row = index % rows, key_head = index / rows;
    const int32_t query = (first_row + row) / heads;
    combine_row<Element, kTile, kShare>(
        arguments, pieces, key_head * kRows + row, index < all, segment.request.first_query + query,
        (segment.head_group * kTile.heads + key_head) * heads + (first_row + row) % heads, values + own * kShare * 32,
        sums + own * kShare);
  }
}

// A block looks at the first unit of its worker: where that lies inside a segment, the segment is cut there.
template <class Element, Tile kTile>
__global__ void __launch_bounds__(kCombineThreads, 1) combine(const __grid_constant__ WorkArguments work) {
  __shared__ int64_t own_plan[kSharedRequests + 1];
  __shared__ float4 values[kCombineThreads];
  __shared__ float sums[kCombineThreads / 32];
  const int64_t* plan = plan_of<kTile>(work, own_plan);
  tile::wait_for_earlier_kernels();
  const AttendArguments& arguments = work.attend;
  clear_rest<Element>(arguments);
  const Workers workers(work, plan);
  for (int64_t worker = 1 + blockIdx.x; worker < workers.count; worker += gridDim.x) {
    const int64_t unit = workers.begin(worker);
    const Segment segment = segment_of<kTile>(work, plan, unit);
    if (segment.first_unit == unit) continue;
    const int64_t first = workers.of(segment.first_unit), last = workers.of(segment.first_unit + segment.units - 1);
    Pieces<kTile> pieces;
    pieces.first = piece_at<kTile>(work, place_of_piece(work, workers, first, segment.first_unit));
    pieces.others = piece_at<kTile>(work, place_of_piece(work, workers, first + 1, segment.first_unit));
    pieces.distance = static_cast<int64_t>(Pieces<kTile>::kFloats) * (work.workers == 0 ? 1 : 2);
    pieces.count = static_cast<int32_t>(last - first) + 1;
    const int32_t cut = static_cast<int32_t>(worker - first) - 1;
    if (pieces.count > 32) {
      combine_rows<Element, kTile, 16>(arguments, segment, pieces, cut, values, sums);
    } else if (pieces.count > 4) {
      combine_rows<Element, kTile, 4>(arguments, segment, pieces, cut, values, sums);
    } else {
      combine_rows<Element, kTile, 1>(arguments, segment, pieces, cut, values, sums);
    }
  }
}

}  // namespace kernel_pytorch::paged_attention
