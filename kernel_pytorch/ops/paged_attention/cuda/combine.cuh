// What follows the workers: the pieces of segments that were cut, and tokens of nobody.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/work.cuh"

namespace kernel_pytorch::paged_attention {

// The pieces of segments, in order. A block looks at the first unit of its worker: where that lies inside a segment,
// the segment is cut there, and the workers at its cuts share its rows. Threads take columns and, four at a time,
// pieces.
template <class Element, Tile kTile>
__global__ void __launch_bounds__(kCombineThreads, 2) combine(const __grid_constant__ WorkArguments work) {
  constexpr int kRows = tile_rows(kTile), kGroups = 4, kColumnThreads = kCombineThreads / kGroups;
  constexpr int kPieceFloats = kRows * (kTile.value_size + 2);
  __shared__ float values[kGroups][kColumnThreads], sums[kGroups];
  __shared__ float largests[kCombineThreads / 32];
  const AttendArguments& arguments = work.attend;
  const Workers workers(work);
  const int32_t thread = static_cast<int32_t>(threadIdx.x), group = thread / kColumnThreads;
  for (int64_t worker = 1 + blockIdx.x; worker < workers.count; worker += gridDim.x) {
    const int64_t unit = workers.begin(worker);
    const Segment segment = segment_of<kTile>(work, unit);
    if (segment.first_unit == unit) continue;
    const int64_t first = workers.of(segment.first_unit), last = workers.of(segment.first_unit + segment.units - 1);
    const int32_t pieces = static_cast<int32_t>(last - first) + 1, cut = static_cast<int32_t>(worker - first) - 1;
    const int32_t heads = static_cast<int32_t>(arguments.group_divider.divisor), first_row = segment.row_tile * kRows;
    const int32_t rows = min(kRows, segment.request.queries * heads - first_row);
    // The first piece may lie behind the one that its worker goes on with; all others are one after another.
    const float* first_piece = piece_at<kTile>(work, place_of_piece(work, workers, first, segment.first_unit));
    const float* others = piece_at<kTile>(work, place_of_piece(work, workers, first + 1, segment.first_unit));
    const int64_t distance = static_cast<int64_t>(kPieceFloats) * (work.workers == 0 ? 1 : 2);
    const auto piece_of = [&](int32_t i) { return i == 0 ? first_piece : others + (i - 1) * distance; };
    for (int32_t row = cut; row < rows; row += pieces - 1) {
      float largest = tile::minus_infinity();
      for (int32_t i = thread; i < pieces; i += kCombineThreads) {
        largest = fmaxf(largest, piece_of(i)[kRows * kTile.value_size + row]);
      }
      largest = tile::max_lanes<32>(largest);
      if (thread % 32 == 0) largests[thread / 32] = largest;
      __syncthreads();
#pragma unroll
      for (float one : largests) largest = fmaxf(largest, one);
      const float base = largest == tile::minus_infinity() ? 0.0f : largest;
      const int32_t query = (first_row + row) / heads, head = segment.key_head * heads + (first_row + row) % heads;
      const int32_t token = segment.request.first_query + query;
      for (int32_t first_column = 0; first_column < arguments.value_size; first_column += kColumnThreads) {
        const int32_t column = first_column + thread % kColumnThreads;
        float sum = 0.0f, value = 0.0f;
#pragma unroll 4
        for (int32_t i = group; i < pieces; i += kGroups) {
          const float* piece = piece_of(i);
          const float weight = ptx::ex2_approx_ftz_f32(piece[kRows * kTile.value_size + row] - base);
          sum += weight * piece[kRows * (kTile.value_size + 1) + row];
          value += column < arguments.value_size ? weight * piece[row * kTile.value_size + column] : 0.0f;
        }
        values[group][thread % kColumnThreads] = value;
        if (thread % kColumnThreads == 0) sums[group] = sum;
        __syncthreads();
        if (group == 0 && column < arguments.value_size) {
#pragma unroll
          for (int i = 1; i < kGroups; ++i) value += values[i][thread % kColumnThreads];
          sum = ((sums[0] + sums[1]) + sums[2]) + sums[3];
          float factor;
          const float lse = finish_row(arguments, head, largest, sum, factor);
          if (column == 0 && arguments.lse != nullptr) arguments.lse[head * arguments.tokens + token] = lse;
          static_cast<Element*>(
              arguments.output)[token * arguments.output_token_stride + head * arguments.output_head_stride + column] =
              tile::from_float<Element>(value * factor);
        }
        __syncthreads();
      }
    }
  }
}

// Tokens past the last request.
template <class Element>
__global__ void __launch_bounds__(kThreads) clear_rest(const __grid_constant__ AttendArguments arguments) {
  const int32_t first = arguments.cu_seqlens_q[arguments.requests];
  for (int32_t token = first + static_cast<int32_t>(blockIdx.x); token < arguments.tokens; token += gridDim.x) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < arguments.heads * arguments.value_size; i += kThreads) {
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

}  // namespace kernel_pytorch::paged_attention
