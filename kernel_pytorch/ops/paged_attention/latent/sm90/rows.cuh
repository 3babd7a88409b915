// The 64 rows of queries of a block: heads of tokens that share the keys. How they are loaded and stored.
#pragma once

#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/memory.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/piece.cuh"

namespace kernel_pytorch::paged_attention {

template <class Element, Tile kTile>
class LatentTileRows {
 protected:
  __device__ __forceinline__ LatentTileRows(const AttendArguments& arguments, const LatentRoom& room)
      : arguments_(arguments), room_(room), piece_(room.piece()) {}

  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  // Rows of the accumulators of this thread: this one, and the one that lies eight further.
  __device__ __forceinline__ int32_t own_row() const {
    return static_cast<int32_t>(threadIdx.x / 32 % 4) * 16 + lane() / 4;
  }
  __device__ __forceinline__ Row row_at(int32_t row) const {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments_.group_divider));
    return {query, row - query * static_cast<int32_t>(arguments_.group_divider.divisor)};
  }
  __device__ __forceinline__ KeyRange range_of(int32_t place) const {
    const Request& request = piece_.request;
    const int32_t row = min(piece_.first_row + place, piece_.last_row);
    return keys_seen(arguments_, request, request.position(row_at(row).query));
  }

  // By both warpgroups; rows past the last are zeros.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kUnits = kTile.size * 2 / 16, kThreadCount = 256;
#pragma unroll 3
    for (int i = static_cast<int>(threadIdx.x); i < kLatentRows * kUnits; i += kThreadCount) {
      const int32_t place = i / kUnits, unit = i % kUnits;
      ptx::Word4 word{};
      if (piece_.first_row + place <= piece_.last_row) {
        const Row at = row_at(piece_.first_row + place);
        const Element* from = static_cast<const Element*>(arguments_.query) +
                              (piece_.request.first_query + at.query) * arguments_.query_token_stride +
                              at.head * arguments_.query_head_stride;
        word = ptx::ld_global_nc_v4(from + unit * 8);
      }
      ptx::st_shared_v4(room_.queries() + unit / 8 * kLatentChunkBytes + tile::swizzled_offset(place, unit % 8), word);
    }
  }

  // Columns from first_column on, of both rows; the warpgroup that leads has the lse too.
  template <int kCount>
  __device__ __forceinline__ void store_rows(const float (&output)[kCount], const float (&largest)[2],
                                             const float (&sum)[2], int32_t first_column, bool leads) const {
    float* const result = piece_.result;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = piece_.first_row + own_row() + 8 * half;
      if (row > piece_.last_row) continue;
      const Row at = row_at(row);
      const int32_t token = piece_.request.first_query + at.query, column = first_column + lane() % 4 * 2;
      const bool writes_sums = leads && lane() % 4 == 0;
      if (result == nullptr) {
        float factor;
        const float lse = finish_row(arguments_, at.head, largest[half], sum[half], factor);
        if (writes_sums && arguments_.lse != nullptr) arguments_.lse[at.head * arguments_.tokens + token] = lse;
        Element* to = static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                      at.head * arguments_.output_head_stride + column;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          const float pair[2] = {output[4 * i + 2 * half] * factor, output[4 * i + 2 * half + 1] * factor};
          *reinterpret_cast<uint32_t*>(to + 8 * i) = tile::Word<Element>::pack(pair);
        }
      } else {
        constexpr int kAllRows = tile_rows(kTile);
        const int32_t place = row % kAllRows;
        if (writes_sums) {
          result[kAllRows * kTile.value_size + place] = largest[half];
          result[kAllRows * (kTile.value_size + 1) + place] = sum[half];
        }
        float* to = result + place * kTile.value_size + column;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          *reinterpret_cast<float2*>(to + 8 * i) = make_float2(output[4 * i + 2 * half], output[4 * i + 2 * half + 1]);
        }
      }
    }
  }

  const AttendArguments& arguments_;
  const LatentRoom room_;
  const LatentPiece& piece_;
};

}  // namespace kernel_pytorch::paged_attention
