// The 64 rows of queries of a block: heads of tokens that share the keys. How they are loaded and stored.
#pragma once

#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/memory.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/piece.cuh"

namespace kernel_pytorch::paged_attention {

// The block's rank among those that share keys says which rows of the tile are its own.
template <Tile kTile>
__device__ __forceinline__ int32_t first_latent_row(const Segment& segment) {
  return segment.row_tile * tile_rows(kTile) + static_cast<int32_t>(blockIdx.x) % latent_share(kTile) * kLatentRows;
}
__device__ __forceinline__ int32_t latent_row_count(const AttendArguments& arguments, const Segment& segment) {
  return segment.request.queries * static_cast<int32_t>(arguments.group_divider.divisor);
}

template <class Element, Tile kTile>
class LatentTileRows {
 protected:
  __device__ __forceinline__ LatentTileRows(const AttendArguments& arguments, const LatentRoom& room)
      : arguments_(arguments), room_(room) {}

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
    return keys_seen(arguments_, request_, request_.position(row_at(min(first_row_ + place, last_row_)).query));
  }

  __device__ __forceinline__ void begin_rows(const Segment& segment) {
    request_ = segment.request;
    first_row_ = first_latent_row<kTile>(segment);
    last_row_ = latent_row_count(arguments_, segment) - 1;
  }

  // By both warpgroups; rows past the last are zeros.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kUnits = kTile.size * 2 / 16, kThreadCount = 256;
#pragma unroll 6
    for (int i = static_cast<int>(threadIdx.x); i < kLatentRows * kUnits; i += kThreadCount) {
      const int32_t place = i / kUnits, unit = i % kUnits;
      ptx::Word4 word{};
      if (first_row_ + place <= last_row_) {
        const Row at = row_at(first_row_ + place);
        const Element* from = static_cast<const Element*>(arguments_.query) +
                              (request_.first_query + at.query) * arguments_.query_token_stride +
                              at.head * arguments_.query_head_stride;
        word = ptx::ld_global_nc_v4(from + unit * 8);
      }
      ptx::st_shared_v4(room_.queries() + unit / 8 * kLatentChunkBytes + tile::swizzled_offset(place, unit % 8), word);
    }
  }

  // Columns from first_column on, of both rows; the warpgroup that leads has the lse too.
  template <int kCount>
  __device__ __forceinline__ void store_rows(const float (&output)[kCount], const float (&largest)[2],
                                             const float (&sum)[2], int32_t first_column, bool leads, float* piece) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row_ + own_row() + 8 * half;
      if (row > last_row_) continue;
      const Row at = row_at(row);
      const int32_t token = request_.first_query + at.query, column = first_column + lane() % 4 * 2;
      const bool writes_sums = leads && lane() % 4 == 0;
      if (piece == nullptr) {
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
          piece[kAllRows * kTile.value_size + place] = largest[half];
          piece[kAllRows * (kTile.value_size + 1) + place] = sum[half];
        }
        float* to = piece + place * kTile.value_size + column;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          *reinterpret_cast<float2*>(to + 8 * i) =
              make_float2(output[4 * i + 2 * half], output[4 * i + 2 * half + 1]);
        }
      }
    }
  }

  const AttendArguments& arguments_;
  const LatentRoom room_;
  Request request_;
  int32_t first_row_, last_row_;
};

}  // namespace kernel_pytorch::paged_attention
