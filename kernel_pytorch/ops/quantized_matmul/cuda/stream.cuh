// The product of few rows with a weight in few bits by blocks that stay: x lies in shared memory, arranged as
// codes come out of a word, and is read from memory once a block. Each lane brings its own 16 bytes of codes and its
// scales by cp.async, several stages ahead and across tiles of columns, so that memory never waits for a tile's end.
// kLate: int4 whose groups are a block of k. The codes are multiplied as they are, and a block's sums by the scale.
// Where x is larger than shared memory blocks divide k, and the last one of a tile adds their sums. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/sums.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/ring.cuh"

namespace kernel_pytorch::quantized_matmul {

template <class T, Format kFormat, bool kLate, StreamConfig kConfig>
class StreamProduct {
  static_assert(is_legal(kConfig) && (!kLate || kFormat == Format::kInt4));
  using Chunk = WeightChunk<T, kFormat>;
  static constexpr int kTiles = kConfig.tiles, kChunks = 2 * kTiles, kRows = kStreamRows;
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr int kColumns = stream_columns(kConfig), kPitch = kColumns + kPartPadding;
  static constexpr int kSpan = span_of(kFormat);
  using Ring = WeightRing<T, kFormat, kChunks, kConfig.stages>;
  static constexpr int kWarpRingBytes = stream_ring_bytes(kFormat, kConfig) / kConfig.warps;
  using Parts = float[kConfig.k_warps][kRows][kPitch];

 public:
  __device__ __forceinline__ StreamProduct(const StreamArguments& arguments, unsigned char* memory)
      : arguments_(arguments),
        weight_(arguments.product.weight),
        tile_(arguments.product.tile),
        sums_(reinterpret_cast<Parts*>(memory)),
        ring_(weight_, ptx::shared_address(memory) + stream_part_bytes(kConfig) + threadIdx.x / 32 * kWarpRingBytes,
              static_cast<int32_t>(threadIdx.x % 32)),
        x_(ptx::shared_address(memory) + stream_part_bytes(kConfig) + stream_ring_bytes(kFormat, kConfig)),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        part_(static_cast<int32_t>(blockIdx.x) % arguments.parts) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
    k_warp_ = warp % kConfig.k_warps;
    column_ = warp / kConfig.k_warps * 16 * kTiles;
    x_sums_ = x_ + kConfig.k_warps * arguments.rounds * kSpan * 2 * tile_.m;
    first_tile_ = static_cast<int32_t>(blockIdx.x) / arguments.parts;
    tile_step_ = static_cast<int32_t>(gridDim.x) / arguments.parts;
    first_k_ = (part_ * kConfig.k_warps + k_warp_) * arguments.rounds * kSpan;
  }

  __device__ __forceinline__ void run() {
    tile::let_next_kernel_start();
    tile::wait_for_earlier_kernels();
    Place ahead{first_tile_, 0};
#pragma unroll 1
    for (int stage = 0; stage < kConfig.stages; ++stage) fetch(ahead, stage);
    copy_x();
    __syncthreads();
    if constexpr (kLate) {
      add_x();
      __syncthreads();
    }
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int32_t tile = first_tile_; tile < arguments_.tiles; tile += tile_step_) {
      float sums[kTiles][1][4] = {};
#pragma unroll 1
      for (int32_t round = 0; round < arguments_.rounds; ++round) {
        ptx::cp_async_wait_group<kConfig.stages - 1>();
        add(sums, stage, round);
        fetch(ahead, stage);
        stage = stage + 1 == kConfig.stages ? 0 : stage + 1;
      }
      product::store_thin_sums(sums, sums_[buffer][k_warp_], lane_, column_);
      __syncthreads();
      finish(tile, sums_[buffer]);
      buffer ^= 1;  // its readers meet the others before it is written again
    }
    ptx::cp_async_wait_group<0>();
  }

 private:
  struct Place {
    int32_t tile, round;
  };

  __device__ __forceinline__ int32_t lane_k(int32_t round) const {
    return first_k_ + round * kSpan + lane_ % 4 * (kSpan / 4);
  }

  // The next block of k of this warp; always one group of copies.
  __device__ __forceinline__ void fetch(Place& place, int stage) {
    if (place.tile < arguments_.tiles) {
      if (place.round == 0) ring_.point_at(place.tile * kColumns + column_, tile_.n, lane_k(0));
      ring_.fetch(stage, tile_.k);
      if (++place.round == arguments_.rounds) place = {place.tile + tile_step_, 0};
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void add(float (&sums)[kTiles][1][4], int stage, int32_t round) const {
    Chunk chunks[kChunks];
    ring_.take(stage, lane_k(round), chunks);
    const int32_t block = k_warp_ * arguments_.rounds + round;
    if constexpr (kLate) {
      float part[kTiles][1][4] = {};
      multiply(part, block, [&](int chunk, int word, uint32_t(&pairs)[4]) { chunks[chunk].raw_pairs(word, pairs); });
      float of_x[2];
      ptx::ld_shared_v2_f32(of_x[0], of_x[1], x_sums_ + (block * kRows + lane_ % 4 * 2) * 4);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const Chunk& chunk = chunks[2 * i + r / 2];
          const float sum = fmaf(-chunk.raw_offset(), of_x[r % 2], part[i][0][r]);
          sums[i][0][r] = fmaf(chunk.float_scale(), sum, sums[i][0][r]);
        }
      }
    } else {
      typename Chunk::Factors factors[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) factors[i] = chunks[i].factors();
      bool has_large = false;
      if constexpr (kFormat == Format::kMxfp4) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) has_large |= chunks[i].is_large();
        has_large = __any_sync(0xffffffff, has_large);
      }
      if (has_large) {
        multiply(sums, block, [&](int chunk, int word, uint32_t(&pairs)[4]) {
          chunks[chunk].template decode<false>(word, factors[chunk], pairs);
        });
      } else {
        multiply(sums, block, [&](int chunk, int word, uint32_t(&pairs)[4]) {
          chunks[chunk].template decode<true>(word, factors[chunk], pairs);
        });
      }
    }
  }

  template <class Decode>
  __device__ __forceinline__ void multiply(float (&sums)[kTiles][1][4], int32_t block, const Decode& decode) const {
    const int32_t row = min(lane_ / 4, tile_.m - 1);  // others' sums are of no use
    const uint32_t line = x_ + (block * Chunk::kWords * tile_.m + row) * 64 + lane_ % 4 * 16;
#pragma unroll
    for (int word = 0; word < Chunk::kWords; ++word) {
      const ptx::Word4 x = ptx::ld_shared_v4(line + word * tile_.m * 64);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint32_t low[4], high[4];
        decode(2 * i, word, low);
        decode(2 * i + 1, word, high);
        const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
        tile::multiply_fragments<T>(sums[i][0], first, x.x, x.y);
        tile::multiply_fragments<T>(sums[i][0], second, x.z, x.w);
      }
    }
  }

  // This part of x: [block of k][word][row][lane of four] of 16 bytes, zeros behind the last column.
  __device__ __forceinline__ void copy_x() const {
    const int32_t units = kConfig.k_warps * arguments_.rounds * (kSpan / 8);
    const int32_t begin = part_ * units;
#pragma unroll 2
    for (int32_t index = static_cast<int32_t>(threadIdx.x); index < units * tile_.m; index += kThreads) {
      const int32_t row = index / units, unit = index % units, k = (begin + unit) * 8;
      uint32_t pairs[4];
      order_pairs<kFormat>(
          ptx::ld_global_v4_if(k < tile_.k, static_cast<const T*>(tile_.a.data) + row * tile_.a.outer + k), pairs);
      const int32_t block = unit / (4 * Chunk::kWords), word = unit % Chunk::kWords, quarter = unit / Chunk::kWords % 4;
      ptx::st_shared_v4(x_ + ((block * Chunk::kWords + word) * tile_.m + row) * 64 + quarter * 16,
                        {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
  }

  // Of each block of k and row: what integers without their zeros have too much of.
  __device__ __forceinline__ void add_x() const {
    const int32_t blocks = kConfig.k_warps * arguments_.rounds;
    for (int32_t index = static_cast<int32_t>(threadIdx.x); index < blocks * kRows; index += kThreads) {
      const int32_t block = index / kRows, row = index % kRows;
      float sum = 0.0f;
      for (int unit = 0; row < tile_.m && unit < kSpan / 8; ++unit) {
        const ptx::Word4 words =
            ptx::ld_shared_v4(x_ + ((block * Chunk::kWords + unit / 4) * tile_.m + row) * 64 + unit % 4 * 16);
        float values[8];
        tile::Vector<T>{words}.unpack(values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += values[i];
      }
      ptx::st_shared_f32(x_sums_ + index * 4, sum);
    }
  }

  __device__ __forceinline__ void finish(int32_t tile, const Parts& parts) const {
    product::TileFinish finish(tile_);
    const float factor = factor_of<kFormat>(weight_);
    const int32_t first_column = tile * kColumns;
    if (arguments_.parts == 1) {
      product::add_thin_sums<kThreads, kColumns>(parts, [&](int32_t row, int32_t column, float first, float second) {
        finish.finish(row, first_column + column, first * factor, second * factor);
      });
      return;
    }
    float2* all = reinterpret_cast<float2*>(arguments_.sums) +
                  static_cast<int64_t>(tile) * arguments_.parts * (kRows * kColumns / 2);
    product::add_thin_sums<kThreads, kColumns>(parts, [&](int32_t row, int32_t column, float first, float second) {
      all[(part_ * kRows + row) * (kColumns / 2) + column / 2] = make_float2(first, second);
    });
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = tile::arrives_last(arguments_.counters + tile, arguments_.parts);
    __syncthreads();
    if (!is_last) return;
#pragma unroll 1
    for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kRows * kColumns / 2; pair += kThreads) {
      float first = 0.0f, second = 0.0f;
      for (int32_t part = 0; part < arguments_.parts; ++part) {
        const float2 sum = __ldcg(all + part * (kRows * kColumns / 2) + pair);
        first += sum.x;
        second += sum.y;
      }
      const int32_t row = pair / (kColumns / 2), column = pair % (kColumns / 2) * 2;
      finish.finish(row, first_column + column, first * factor, second * factor);
    }
  }

  const StreamArguments& arguments_;
  const WeightArguments& weight_;
  const product::TileArguments& tile_;
  Parts* sums_;  // two of them
  Ring ring_;
  uint32_t x_, x_sums_;                    // shared memory
  int32_t lane_, part_, k_warp_, column_;  // column_: the warp's first one in a tile
  int32_t first_tile_, tile_step_, first_k_;
};

template <class T, Format kFormat, bool kLate, StreamConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps * 32, 1)
    stream_product(const __grid_constant__ StreamArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  StreamProduct<T, kFormat, kLate, kConfig>(arguments, memory).run();
}

}  // namespace kernel_pytorch::quantized_matmul
