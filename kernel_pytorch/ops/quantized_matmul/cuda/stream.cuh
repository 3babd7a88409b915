// The product of one or two rows with a weight in few bits by blocks that stay: x lies in shared memory, arranged as
// codes come out of a word, and is read from memory once a block; one warp keeps a ring of stages of the weight full
// (stage.cuh), across tiles of columns, so that memory never waits for a tile's end. The weight is the first operand of
// mma, x the second. Where x is larger than shared memory blocks divide k.
// kColumns: one row of x, and eight columns of the second operand. Each group of a block of k has a column that is zero
// elsewhere, so that a column's sum is that group's, and its scale is one product of sums. E2M1's bits are multiplied
// as they are, 2^126 too small in bf16: x is made larger by a power of two before. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/sums.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/stage.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/walk.cuh"

namespace kernel_pytorch::quantized_matmul {

struct StreamShared {
  tile::Barrier full[kMostStages], empty[kMostStages];
  uint32_t amax, is_last;
};
static_assert(sizeof(StreamShared) <= kStreamBarrierBytes);

template <class T, Format kFormat, StreamScaling kScaling, StreamConfig kConfig>
class StreamProduct {
  static constexpr bool kColumnSums = kScaling == StreamScaling::kColumns, kLate = kScaling == StreamScaling::kSums;
  static_assert(is_legal(kConfig) && (!kLate || kFormat == Format::kInt4));
  static_assert(!kColumnSums || group_format::is_e2m1(kFormat));
  using Chunk = WeightChunk<T, kFormat>;
  static constexpr int kTiles = kConfig.tiles, kRows = kColumnSums ? 1 : kStreamRows;
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr int kColumns = stream_columns(kConfig), kPitch = kColumns + kPartPadding;
  static constexpr int kSpan = span_of(kFormat);
  using Stage = WeightStage<kFormat, kColumns, kConfig.k_warps, kConfig.box>;
  using Parts = float[kConfig.k_warps][kRows][kPitch];
  using Sums = float[kTiles][1][4];

 public:
  // Stages, barriers, sums of warps, x, its sums.
  __device__ __forceinline__ StreamProduct(const StreamArguments& arguments, unsigned char* memory)
      : arguments_(arguments),
        weight_(arguments.product.weight),
        tile_(arguments.product.tile),
        shared_(*reinterpret_cast<StreamShared*>(memory + stream_ring_bytes(kFormat, kConfig))),
        sums_(reinterpret_cast<Parts*>(memory + stream_ring_bytes(kFormat, kConfig) + kStreamBarrierBytes)),
        stages_(ptx::shared_address(memory)),
        x_(stages_ + stream_ring_bytes(kFormat, kConfig) + kStreamBarrierBytes + stream_part_bytes(kConfig, kRows)),
        x_sums_(x_ + arguments.walk.steps * kConfig.k_warps * kSpan * 2 * tile_.m),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        part_(static_cast<int32_t>(blockIdx.x) % arguments.parts),
        block_(static_cast<int32_t>(blockIdx.x) / arguments.parts) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kConfig.stages; ++i) {
        shared_.full[i].init(Stage::kFullArrivals);
        shared_.empty[i].init(kConfig.warps);
      }
      shared_.amax = 0;
    }
    __syncthreads();
    tile::let_next_kernel_start();
    tile::wait_for_earlier_kernels();
    if (threadIdx.x >= kThreads) {
      produce();
    } else {
      consume();
    }
  }

 private:
  __device__ __forceinline__ int32_t first_span(int32_t step) const {
    return (part_ * arguments_.walk.steps + step) * kConfig.k_warps;
  }

  __device__ __forceinline__ void produce() {
    typename Stage::Producer producer(weight_, arguments_.codes);
    tile::PipelineState state;
#pragma unroll 1
    for (StepWalk walk(arguments_.walk, block_); walk.has_tile(); walk.advance(arguments_.walk)) {
      producer.point_at(walk.tile * kColumns, tile_.n);
#pragma unroll 1
      for (int32_t step = walk.step; step < walk.end; ++step) {
        shared_.empty[state.stage].wait(state.parity ^ 1);
        producer.fetch(stages_ + state.stage * Stage::kBytes, shared_.full[state.stage].address(), first_span(step));
        state.advance(kConfig.stages);
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }

  __device__ __forceinline__ void consume() {
    const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
    k_warp_ = warp % kConfig.k_warps;
    row_ = warp / kConfig.k_warps * 16 * kTiles;
    prepare_x();
    tile::PipelineState state;
    ptx::Word4 x[Chunk::kWords] = {};
    int buffer = 0;
#pragma unroll 1
    for (StepWalk walk(arguments_.walk, block_); walk.has_tile(); walk.advance(arguments_.walk)) {
      Sums sums = {};
#pragma unroll 1
      for (int32_t step = walk.step; step < walk.end; ++step) {
        shared_.full[state.stage].wait(state.parity);
        const uint32_t stage = stages_ + state.stage * Stage::kBytes;
        if constexpr (kColumnSums) {
          add_columns(sums, stage, step, x);
        } else {
          add(sums, stage, step);
        }
        __syncwarp();
        if (lane_ == 0) shared_.empty[state.stage].arrive();
        state.advance(kConfig.stages);
      }
      store(sums, sums_[buffer]);
      synchronize();
      finish(walk, sums_[buffer]);
      buffer ^= 1;  // its readers meet the others before it is written again
    }
  }
  static __device__ __forceinline__ void synchronize() {
    ptx::barrier_sync_aligned(1, kThreads);
  }

  __device__ __forceinline__ ptx::Word4 codes(uint32_t stage, int chunk) const {
    return Stage::codes(stage, row_ + 8 * chunk, k_warp_, lane_);
  }
  // Of the lane's first row; others of its fragments lie multiples of eight rows behind.
  __device__ __forceinline__ uint32_t scales(uint32_t stage, int32_t step) const {
    const int32_t span = first_span(step);
    return Stage::scale_address(weight_, stage, row_ + Stage::row_of(lane_), span, (span + k_warp_) * kSpan);
  }

  __device__ __forceinline__ void add(Sums& sums, uint32_t stage, int32_t step) const {
    Chunk chunks[2 * kTiles];
    Stage::take(weight_, stage, row_, first_span(step), k_warp_, chunks);
    const int32_t block = step * kConfig.k_warps + k_warp_;
    if constexpr (kLate) {
      Sums part = {};
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
      typename Chunk::Factors factors[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) factors[i] = chunks[i].factors();
      bool has_large = false;
      if constexpr (kFormat == Format::kMxfp4) {
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) has_large |= chunks[i].is_large();
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
  __device__ __forceinline__ void multiply(Sums& sums, int32_t block, const Decode& decode) const {
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

  // `x` stays zero in lanes that have no part of a column: nvfp4's column n is the first (n < 4) or second half of what
  // lane n % 4 has, mxfp4's column n < 4 all of it.
  __device__ __forceinline__ void add_columns(Sums& sums, uint32_t stage, int32_t step,
                                              ptx::Word4 (&x)[Chunk::kWords]) const {
    constexpr bool kHalves = kFormat == Format::kNvfp4;
    const uint32_t line = x_ + (step * kConfig.k_warps + k_warp_) * Chunk::kWords * 64 + lane_ % 4 * 16;
    const int32_t column = lane_ / 4, quarter = lane_ % 4;
#pragma unroll
    for (int word = 0; word < Chunk::kWords; ++word) {
      ptx::ld_shared_v4_where(column == quarter + (kHalves && word >= Chunk::kWords / 2 ? 4 : 0), x[word],
                              line + word * 64);
    }
    const uint32_t scale = scales(stage, step) + quarter % 2 * (kHalves ? 4 : 2);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      Chunk chunks[2];
      float factors[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        chunks[half].set(codes(stage, 2 * i + half), 0, 0);
        const uint32_t address = scale + 8 * (2 * i + half) * Stage::kScalePitch;
        if constexpr (kHalves) {
          const uint32_t pair = __byte_perm(ptx::ld_shared_u32(address), 0, quarter < 2 ? 0x4420 : 0x4431);
          const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(pair));
          factors[2 * half] = ptx::cvt_f32_f16(static_cast<uint16_t>(halves));
          factors[2 * half + 1] = ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16));
        } else {
          const uint32_t pair = ptx::ld_shared_u16(address);
          factors[2 * half] = power_of_bits(pair << 23);
          factors[2 * half + 1] = power_of_bits(pair << 15);
        }
      }
      float part[4] = {};
#pragma unroll
      for (int word = 0; word < Chunk::kWords; ++word) {
        uint32_t low[4], high[4];
        chunks[0].raw_pairs(word, low);
        chunks[1].raw_pairs(word, high);
        const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
        tile::multiply_fragments<T>(part, first, x[word].x, x[word].y);
        tile::multiply_fragments<T>(part, second, x[word].z, x[word].w);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) sums[i][0][r] = fmaf(factors[r], part[r], sums[i][0][r]);
    }
  }

  __device__ __forceinline__ void store(const Sums& sums, Parts& parts) const {
    if constexpr (kColumnSums) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = sums[i][0][2 * half] + sums[i][0][2 * half + 1];
          sum += __shfl_xor_sync(0xffffffff, sum, 1);
          sum += __shfl_xor_sync(0xffffffff, sum, 2);
          if (lane_ % 4 == 0) parts[k_warp_][0][row_ + 16 * i + 8 * half + Stage::row_of(lane_)] = sum;
        }
      }
    } else {
      product::store_thin_sums(sums, parts[k_warp_], Stage::row_of(lane_) * 4 + lane_ % 4, row_);
    }
  }

  // This part of x: [block of k][word][row][lane of four] of 16 bytes, zeros behind the last column.
  __device__ __forceinline__ void prepare_x() {
    const int32_t units = arguments_.walk.steps * kConfig.k_warps * (kSpan / 8), begin = part_ * units;
    const auto load = [&](int32_t row, int32_t k) {
      return ptx::ld_global_v4_if(k < tile_.k, static_cast<const T*>(tile_.a.data) + row * tile_.a.outer + k);
    };
    int32_t exponent = 0;
    if constexpr (kColumnSums && sizeof(T) == 2 && PairMath<T>::kE2M1Factor > 0x1p100f) {
      uint32_t amax = 0;  // of both halves, and of every part of k
      for (int32_t k = static_cast<int32_t>(threadIdx.x) * 8; k < tile_.k; k += kThreads * 8) {
        const ptx::Word4 x = load(0, k);
        amax = __vmaxu2(__vmaxu2(amax, __vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff)),
                        __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
      }
      amax = __reduce_max_sync(0xffffffff, max(amax & 0xffff, amax >> 16));
      if (lane_ == 0) atomicMax(&shared_.amax, amax);
      synchronize();
      exponent = 247 - static_cast<int32_t>(shared_.amax >> 7);  // the largest is 2^120 then
    }
    const float first_factor = power_of_two(exponent / 2), second_factor = power_of_two(exponent - exponent / 2);
#pragma unroll 2
    for (int32_t index = static_cast<int32_t>(threadIdx.x); index < units * tile_.m; index += kThreads) {
      const int32_t row = index / units, unit = index % units;
      ptx::Word4 x = load(row, (begin + unit) * 8);
      if (kColumnSums && exponent != 0) {
        float values[8];
        tile::Vector<T>{x}.unpack(values);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = values[i] * first_factor * second_factor;
        x = tile::Vector<T>::pack(values).words;
      }
      uint32_t pairs[4];
      order_pairs<kFormat>(x, pairs);
      const int32_t block = unit / (4 * Chunk::kWords), word = unit % Chunk::kWords, quarter = unit / Chunk::kWords % 4;
      ptx::st_shared_v4(x_ + ((block * Chunk::kWords + word) * tile_.m + row) * 64 + quarter * 16,
                        {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
    if constexpr (kColumnSums) {
      const int32_t missing = (PairMath<T>::kE2M1Factor > 0x1p100f ? 126 : 14) - exponent;
      factors_[0] = power_of_two(missing / 2);
      factors_[1] = power_of_two(missing - missing / 2);
    }
    synchronize();
    if constexpr (kLate) {
      add_x();
      synchronize();
    }
  }
  static __device__ __forceinline__ float power_of_two(int32_t exponent) {
    return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  }

  // Of each block of k and row: what integers without their zeros have too much of.
  __device__ __forceinline__ void add_x() const {
    const int32_t blocks = arguments_.walk.steps * kConfig.k_warps;
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

  __device__ __forceinline__ float finished(float sum) const {
    if constexpr (kColumnSums) {
      return sum * factors_[0] * factors_[1] * (weight_.tensor_scale != nullptr ? *weight_.tensor_scale : 1.0f);
    } else {
      return sum * factor_of<kFormat>(weight_);
    }
  }

  __device__ __forceinline__ void finish(const StepWalk& walk, const Parts& parts) const {
    product::TileFinish finish(tile_);
    const int32_t first_column = walk.tile * kColumns;
    if (arguments_.parts == 1 && walk.is_whole(arguments_.walk)) {
      product::add_thin_sums<kThreads, kColumns>(parts, [&](int32_t row, int32_t column, float first, float second) {
        finish.finish(row, first_column + column, finished(first), finished(second));
      });
      return;
    }
    constexpr int kPairs = kRows * kColumns / 2;
    const TileBlocks blocks(arguments_.walk, walk.tile);
    const int32_t most = arguments_.walk.most;
    float2* all =
        reinterpret_cast<float2*>(arguments_.sums) + static_cast<int64_t>(walk.tile) * arguments_.parts * most * kPairs;
    float2* mine = all + (part_ * most + block_ - blocks.first) * kPairs;
    product::add_thin_sums<kThreads, kColumns>(parts, [&](int32_t row, int32_t column, float first, float second) {
      mine[row * (kColumns / 2) + column / 2] = make_float2(first, second);
    });
    synchronize();
    if (threadIdx.x == 0) {
      shared_.is_last = tile::arrives_last(arguments_.counters + walk.tile, arguments_.parts * blocks.count);
    }
    synchronize();
    if (shared_.is_last == 0) return;
#pragma unroll 1
    for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kPairs; pair += kThreads) {
      float first = 0.0f, second = 0.0f;
      for (int32_t part = 0; part < arguments_.parts; ++part) {
        for (int32_t i = 0; i < blocks.count; ++i) {
          const float2 sum = __ldcg(all + (part * most + i) * kPairs + pair);
          first += sum.x;
          second += sum.y;
        }
      }
      const int32_t row = pair / (kColumns / 2), column = pair % (kColumns / 2) * 2;
      finish.finish(row, first_column + column, finished(first), finished(second));
    }
  }

  const StreamArguments& arguments_;
  const WeightArguments& weight_;
  const product::TileArguments& tile_;
  StreamShared& shared_;
  Parts* sums_;                   // two of them
  uint32_t stages_, x_, x_sums_;  // shared memory
  int32_t lane_, part_, block_;   // block_: of those of this part of k
  int32_t k_warp_ = 0, row_ = 0;  // row_: of the weight, the warp's first one in a tile
  float factors_[2] = {1.0f, 1.0f};
};

template <class T, Format kFormat, StreamScaling kScaling, StreamConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps * 32 + 32, 1)
    stream_product(const __grid_constant__ StreamArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  StreamProduct<T, kFormat, kScaling, kConfig>(arguments, memory).run();
}

}  // namespace kernel_pytorch::quantized_matmul
