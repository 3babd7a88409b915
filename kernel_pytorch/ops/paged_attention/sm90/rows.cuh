// The rows of a multiplying warp: which queries they are, their sums, and how these are stored.
#pragma once

#include "kernel_pytorch/ops/paged_attention/sm90/piece.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/products.cuh"

namespace kernel_pytorch::paged_attention {

template <class Element, class Cache, Tile kTile>
class TileRows {
  static constexpr int kRows = tile_rows(kTile), kSlices = slice_count(kTile), kResultPitch = result_pitch(kTile);
  static constexpr int kRowTiles = kTile.rows / 8, kOutputTiles = kTile.value_size / 16;
  using Power = Powers<Element, Cache>;

 protected:
  __device__ __forceinline__ explicit TileRows(const AttendArguments& arguments) : arguments_(arguments) {}

  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ __forceinline__ int32_t warp() const { return static_cast<int32_t>(threadIdx.x / 32); }
  __device__ __forceinline__ int32_t head() const { return warp() % kTile.heads; }
  __device__ __forceinline__ int32_t row_warp() const { return warp() / kTile.heads % kTile.row_warps; }
  __device__ __forceinline__ int32_t slice() const { return warp() / (kTile.heads * kTile.row_warps); }

  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(arguments_.group_divider.divisor); }
  __device__ __forceinline__ int32_t row_count() const { return request_.queries * group(); }
  __device__ __forceinline__ int32_t key_head(int32_t head) const { return first_head_ + head; }
  __device__ __forceinline__ Row row_at(int32_t row, int32_t head) const {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments_.group_divider));
    return {query, key_head(head) * group() + row - query * group()};
  }
  // Of a lane's accumulators: row tile i, its first or second row.
  __device__ __forceinline__ int32_t own_row(int i, int j) const {
    return first_row_ + row_warp() * kTile.rows + i * 8 + lane() % 4 * 2 + j;
  }
  __device__ __forceinline__ Row own_row_at(int i, int j) const {
    return row_at(min(own_row(i, j), row_count() - 1), head());
  }

  // One row of the result: where it goes, and what its values are multiplied with.
  struct Target {
    Element* output;
    float* piece;
    float factor;

    __device__ __forceinline__ void store(int32_t column, float value) const {
      if (piece == nullptr) {
        output[column] = tile::from_float<Element>(value * factor);
      } else {
        piece[column] = value * factor;
      }
    }
  };
  __device__ __forceinline__ Target target_of(float* piece, int32_t row, int32_t head, float largest, float sum,
                                              float value_scale, bool leads) const {
    constexpr int kAllRows = kTile.heads * kRows;
    const Row at = row_at(row, head);
    const int32_t token = request_.first_query + at.query;
    Target target{static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                      at.head * arguments_.output_head_stride,
                  nullptr, 1.0f};
    sum *= 1.0f / Power::kWeight;
    if (piece == nullptr) {
      const float lse = finish_row(arguments_, at.head, largest, sum, target.factor);
      if (leads && arguments_.lse != nullptr) arguments_.lse[at.head * arguments_.tokens + token] = lse;
    } else {
      const int32_t place = head * kRows + row - first_row_;
      target.piece = piece + place * kTile.value_size;
      if (leads) {
        piece[kAllRows * kTile.value_size + place] = largest;
        piece[kAllRows * (kTile.value_size + 1) + place] = sum;
      }
    }
    target.factor *= Power::kOutput * value_scale;
    return target;
  }

  __device__ __forceinline__ void store(float* piece) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (own_row(i, j) >= row_count()) continue;
        const Target target =
            target_of(piece, own_row(i, j), head(), largest_[i][j], sum_[i][j], value_scale_, lane() < 4);
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
          for (int index = j; index < 4; index += 2) {
            const int32_t column = output_column<Cache>(lane(), n, index);
            if (column < arguments_.value_size) target.store(column, output_[n][i][index]);
          }
        }
      }
    }
  }

  // Results of a warp: rows, then their largest scores and sums.
  static __device__ __forceinline__ float* result_of(float* results, int warp) {
    return results + warp * kTile.rows * (kResultPitch + 2);
  }
  __device__ __forceinline__ void leave(float* results) const {
    float* own = result_of(results, warp());
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = i * 8 + lane() % 4 * 2 + j;
        if (lane() < 4) {
          own[kTile.rows * kResultPitch + row] = largest_[i][j];
          own[kTile.rows * (kResultPitch + 1) + row] = sum_[i][j];
        }
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
          for (int index = j; index < 4; index += 2) {
            own[row * kResultPitch + output_column<Cache>(lane(), n, index)] = output_[n][i][index];
          }
        }
      }
    }
  }
  __device__ __forceinline__ void store_together(float* results, float* piece) const {
    constexpr int kOthers = kTile.heads * kTile.row_warps, kRowThreads = 32 / kTile.rows * kSlices;
    static_assert(32 % kTile.rows == 0);
    const int32_t index = static_cast<int32_t>(threadIdx.x) / kRowThreads,
                  thread = static_cast<int32_t>(threadIdx.x) % kRowThreads;
    const int32_t first_warp = index / kTile.rows, place = index % kTile.rows, head = first_warp % kTile.heads;
    const int32_t row = first_row_ + first_warp / kTile.heads * kTile.rows + place;
    if (row >= row_count()) return;
    float weights[kSlices], largest = tile::minus_infinity(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      weights[i] = result_of(results, first_warp + i * kOthers)[kTile.rows * kResultPitch + place];
      largest = fmaxf(largest, weights[i]);
    }
    const float base = largest == tile::minus_infinity() ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      weights[i] = ptx::ex2_approx_ftz_f32(weights[i] - base);
      sum += weights[i] * result_of(results, first_warp + i * kOthers)[kTile.rows * (kResultPitch + 1) + place];
    }
    float value_scale = 1.0f;
    if constexpr (kIsCode<Cache>) {
      if (!has_token_scales(arguments_.value)) value_scale = scale_at(arguments_.value, 0, 0, key_head(head));
    }
    const Target target = target_of(piece, row, head, largest, sum, value_scale, thread == 0);
    for (int32_t column = thread; column < arguments_.value_size; column += kRowThreads) {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        value += weights[i] * result_of(results, first_warp + i * kOthers)[place * kResultPitch + column];
      }
      target.store(column, value);
    }
  }

  const AttendArguments& arguments_;
  Request request_;
  int32_t first_row_, first_head_;
  float largest_[kRowTiles][2], sum_[kRowTiles][2], value_scale_;
  float output_[kOutputTiles][kRowTiles][4];
};

}  // namespace kernel_pytorch::paged_attention
