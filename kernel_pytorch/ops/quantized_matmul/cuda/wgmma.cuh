// The product of more than 16 rows with a weight in few bits on Hopper: the weight is the first operand of wgmma, which
// takes it from registers, where lanes decode it; x is the second, in shared memory, where the copy engine puts it. So
// no decoded weight is ever written. x has been arranged (arrange below): a lane's k are those of its own 16 bytes of
// codes, two at a time as they come out of a word. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/stage.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/walk.cuh"

namespace kernel_pytorch::quantized_matmul {

// Each thread has 16 bytes of the output: of product number `step` of a block of k the first or the second eight of k.
// Of these two belong to each of four lanes, a pair of its columns.
template <class T, Format kFormat>
__global__ void __launch_bounds__(256) arrange(const __grid_constant__ ArrangeArguments arguments) {
  tile::follow_closely();
  constexpr int kSpan = span_of(kFormat), kUnits = kSpan / 8;
  const int32_t unit = static_cast<int32_t>(blockIdx.x * 256 + threadIdx.x), row = static_cast<int32_t>(blockIdx.y);
  if (unit >= arguments.units) return;
  const int32_t step = unit % kUnits / 2, word = step / 2, pair = step % 2 * 2 + unit % 2;
  const uint16_t* x = static_cast<const uint16_t*>(arguments.x) + row * arguments.x_stride;
  uint32_t words[4];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    const int32_t eight = unit / kUnits * kSpan + lane * (kSpan / 4) + word * 8;
    const int32_t first = eight + (group_format::has_4_bits(kFormat) ? pair : 2 * pair);
    const int32_t second = first + (group_format::has_4_bits(kFormat) ? 4 : 1);
    words[lane] = eight < arguments.k ? x[first] | static_cast<uint32_t>(x[second]) << 16 : 0;
  }
  ptx::st_global_v4(static_cast<uint16_t*>(arguments.output) + row * arguments.output_stride + unit * 8,
                    {words[0], words[1], words[2], words[3]});
}

template <class T>
constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::kBf16;
template <>
constexpr ptx::WgmmaType kWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

struct WgmmaShared {
  tile::Barrier full[kMostStages], empty[kMostStages];
  uint32_t is_last[4];
};

template <Format kFormat, WgmmaConfig kConfig>
using WgmmaStage = WeightStage<kFormat, kConfig.groups * 64, kConfig.spans, kSpanBytes>;

template <class T, Format kFormat, WgmmaConfig kConfig>
class WgmmaConsumer {
  static_assert(is_legal(kConfig));
  using Stage = WgmmaStage<kFormat, kConfig>;
  using Chunk = WeightChunk<T, kFormat>;
  using Mma = ptx::Wgmma<kConfig.rows, kWgmmaType<T>>;
  using TileX = tile::AlongColumns<kConfig.rows>;

 public:
  __device__ __forceinline__ WgmmaConsumer(const WgmmaArguments& arguments, WgmmaShared& shared, uint32_t memory,
                                           float* boxes)
      : arguments_(arguments),
        shared_(shared),
        x_(memory),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        warpgroup_(static_cast<int32_t>(threadIdx.x / 128)),
        box_(*reinterpret_cast<Box*>(boxes + warpgroup_ * (sizeof(Box) / 4))) {}

  // The codes of a step are taken out of their stage before the last products of the step before.
  __device__ __forceinline__ void run() {
    StepWalk walk(arguments_.walk, static_cast<int32_t>(blockIdx.x));
    if (!walk.has_tile()) return;
    tile::PipelineState state;
    Chunk chunks[2];
    take(state, walk.step, 0, chunks);
#pragma unroll 1
    for (; walk.has_tile(); walk.advance(arguments_.walk)) {
      Sums sums;
      uint32_t words[2][8] = {};
      int previous = -1;
#pragma unroll 1
      for (int32_t step = walk.step; step < walk.end; ++step) {
        const tile::PipelineState now = state;
        state.advance(kConfig.stages);
        // The same in all lanes, which the compiler has to know: else it moves each descriptor into uniform registers.
        const int32_t stage = __shfl_sync(0xffffffffu, now.stage, 0);
        const uint32_t x = TileX::base(x_ + stage * wgmma_x_bytes(kFormat, kConfig));
        const bool is_first = step == walk.step;
        const auto take_next = [&] {
          const int32_t left = walk.left - (step - walk.step) - 1;
          if (left > 0) take(state, step + 1 < walk.end ? step + 1 : 0, 0, chunks);
        };
        if constexpr (kConfig.spans == 1) {
          multiply_span<0>(sums, words, chunks, x, !is_first, previous, take_next);
        } else {
          multiply_span<0>(sums, words, chunks, x, !is_first, previous, [&] { take(now, step, 1, chunks); });
          multiply_span<1>(sums, words, chunks, x, true, previous, take_next);
        }
        previous = now.stage;
      }
      ptx::wgmma_wait_group<0>();
#pragma unroll
      for (int set = 0; set < kConfig.sets; ++set) ptx::tie_registers(sums[set]);
      release(previous);
#pragma unroll
      for (int i = 0; i < (kConfig.sets - 1) * Mma::kCount; ++i) sums[0][i] += sums[kConfig.sets - 1][i];
      finish(sums[0], walk);
    }
  }

 private:
  static constexpr int kBoxRows = wgmma_box_rows(kConfig);
  using Box = float[kBoxRows][kWgmmaBoxPitch];
  using Sums = float[kConfig.sets][Mma::kCount];

  __device__ __forceinline__ int32_t first_column(int32_t tile) const {
    return tile / arguments_.row_tiles * (kConfig.groups * 64) + warpgroup_ * 64;
  }
  __device__ __forceinline__ void take(const tile::PipelineState& state, int32_t step, int32_t span,
                                       Chunk (&chunks)[2]) const {
    if (span == 0) shared_.full[state.stage].wait(state.parity);
    Stage::take(arguments_.product.weight,
                x_ + wgmma_ring_at(kFormat, kConfig) + state.stage * wgmma_stage_bytes(kFormat, kConfig),
                static_cast<int32_t>(threadIdx.x) / 32 * 16, step * kConfig.spans, span, chunks);
  }
  // All of a block of k; `take_next` puts the next one's chunks in place of these before the last products.
  template <int kBlock, class TakeNext>
  __device__ __forceinline__ void multiply_span(Sums& sums, uint32_t (&words)[2][8], Chunk (&chunks)[2], uint32_t x,
                                                bool accumulate, int previous, const TakeNext& take_next) const {
    const typename Chunk::Factors factors[2] = {chunks[0].factors(), chunks[1].factors()};
    bool has_large = false;
    if constexpr (kFormat == Format::kMxfp4) {
      has_large = __any_sync(0xffffffff, chunks[0].is_large() || chunks[1].is_large());
    }
    const Chunk now[2] = {chunks[0], chunks[1]};
    multiply<kBlock, 0>(sums, words, now, factors, has_large, x, accumulate, previous, take_next);
  }
  __device__ __forceinline__ void release(int stage) const {
    if (stage >= 0 && lane_ == 0) shared_.empty[stage].arrive();
  }

  // Eight columns of every lane, while the products of those before are under way; then these products.
  template <int kBlock, int kWord, class TakeNext>
  __device__ __forceinline__ void multiply(Sums& sums, uint32_t (&words)[2][8], const Chunk (&chunks)[2],
                                           const typename Chunk::Factors (&factors)[2], bool has_large, uint32_t x,
                                           bool accumulate, int previous, const TakeNext& take_next) const {
    uint32_t(&a)[8] = words[kWord % 2];
    uint32_t low[4], high[4];
    chunks[0].template decode<true>(kWord, factors[0], low);
    chunks[1].template decode<true>(kWord, factors[1], high);
    if (has_large) {
      Chunk::enlarge(factors[0], low);
      Chunk::enlarge(factors[1], high);
    }
    if constexpr (kWord + 1 == Chunk::kWords) take_next();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = low[i];
      a[2 * i + 1] = high[i];
    }
    ptx::tie_registers(a);
    ptx::wgmma_fence();
    constexpr int kStep = 2 * (kBlock * Chunk::kWords + kWord);
    Mma::template rs<0, TileX::step(kStep)>(sums[0], a, x, accumulate || kWord > 0);
    Mma::template rs<0, TileX::step(kStep + 1)>(sums[kConfig.sets - 1], a + 4, x,
                                                kConfig.sets == 1 || accumulate || kWord > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(words[1 - kWord % 2]);  // their products are done
    if constexpr (kBlock == 0 && kWord == 0) release(previous);
    if constexpr (kWord + 1 < Chunk::kWords) {
      multiply<kBlock, kWord + 1>(sums, words, chunks, factors, has_large, x, true, previous, take_next);
    }
  }

  // Whole tiles are written; of others each block leaves its sums, and the last one to come adds them in order.
  __device__ __forceinline__ void finish(float (&sums)[Mma::kCount], const StepWalk& walk) const {
    if (!walk.is_whole(arguments_.walk) && !meet(sums, walk.tile)) return;
    product::TileFinish finish(arguments_.product.tile);
    const float factor = factor_of<kFormat>(arguments_.product.weight);
    const int32_t thread = static_cast<int32_t>(threadIdx.x) % 128,
                  first_row = walk.tile % arguments_.row_tiles * kConfig.rows;
#pragma unroll
    for (int part = 0; part < kConfig.rows / kBoxRows; ++part) {
      synchronize();
#pragma unroll
      for (int i = 0; i < 2 * kBoxRows / 4; ++i) {
        const int index = part * (2 * kBoxRows / 4) + i;
        box_[tile::fragment_column(lane_, i)][thread / 32 * 16 + tile::fragment_row(lane_, i)] = sums[index] * factor;
      }
      synchronize();
#pragma unroll 1
      for (int32_t pair = thread; pair < kBoxRows * 32; pair += 128) {
        const int32_t row = pair / 32, column = pair % 32 * 2;
        finish.finish(first_row + part * kBoxRows + row, first_column(walk.tile) + column, box_[row][column],
                      box_[row][column + 1]);
      }
    }
  }
  __device__ __forceinline__ void synchronize() const {
    ptx::barrier_sync_aligned(1 + warpgroup_, 128);
  }

  __device__ __forceinline__ bool meet(float (&sums)[Mma::kCount], int32_t tile) const {
    const TileBlocks blocks(arguments_.walk, tile);
    const int32_t thread = static_cast<int32_t>(threadIdx.x) % 128;
    constexpr int kVectors = Mma::kCount / 4;
    float4* all = reinterpret_cast<float4*>(arguments_.sums);
    const auto place = [&](int32_t block, int i) {
      const int64_t at = static_cast<int64_t>(tile) * arguments_.walk.most + block - blocks.first;
      return all + ((at * kConfig.groups + warpgroup_) * kVectors + i) * 128 + thread;
    };
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      *place(static_cast<int32_t>(blockIdx.x), i) =
          make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
    synchronize();
    if (thread == 0) {
      shared_.is_last[warpgroup_] =
          tile::arrives_last(arguments_.counters + tile * kConfig.groups + warpgroup_, blocks.count);
    }
    synchronize();
    const bool is_last = shared_.is_last[warpgroup_] != 0;
    if (!is_last) return false;
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int32_t block = blocks.first; block < blocks.first + blocks.count; ++block) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 part = __ldcg(place(block, i));
        sums[4 * i] += part.x;
        sums[4 * i + 1] += part.y;
        sums[4 * i + 2] += part.z;
        sums[4 * i + 3] += part.w;
      }
    }
    return true;
  }

  const WgmmaArguments& arguments_;
  WgmmaShared& shared_;
  uint32_t x_;
  int32_t lane_, warpgroup_;
  Box& box_;
};

// Rows of x and of the weight for every step, by one warp.
template <Format kFormat, WgmmaConfig kConfig>
__device__ __forceinline__ void produce(const WgmmaArguments& arguments, WgmmaShared& shared, uint32_t tiles) {
  constexpr int kDepth = kConfig.spans * span_of(kFormat), kBytes = wgmma_x_bytes(kFormat, kConfig);
  using Stage = WgmmaStage<kFormat, kConfig>;
  typename Stage::Producer producer(arguments.product.weight, arguments.codes);
  tile::PipelineState state;
#pragma unroll 1
  for (StepWalk walk(arguments.walk, static_cast<int32_t>(blockIdx.x)); walk.has_tile(); walk.advance(arguments.walk)) {
    const int32_t row = walk.tile % arguments.row_tiles * kConfig.rows;
    producer.point_at(walk.tile / arguments.row_tiles * (kConfig.groups * 64), arguments.product.tile.n);
#pragma unroll 1
    for (int32_t step = walk.step; step < walk.end; ++step) {
      shared.empty[state.stage].wait(state.parity ^ 1);
      if (threadIdx.x % 32 == 0) {
        shared.full[state.stage].arrive_expect_bytes(kBytes);
#pragma unroll
        for (int i = 0; i < kDepth / 64; ++i) {
          ptx::cp_async_bulk_tensor_3d_shared_global(tiles + state.stage * kBytes + i * kConfig.rows * 128,
                                                     &arguments.x, step * kDepth + i * 64, row, 0,
                                                     shared.full[state.stage].address());
        }
      }
      producer.fetch(tiles + wgmma_ring_at(kFormat, kConfig) + state.stage * Stage::kBytes,
                     shared.full[state.stage].address(), step * kConfig.spans);
      state.advance(kConfig.stages);
    }
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
}

template <class T, Format kFormat, WgmmaConfig kConfig>
__global__ void __launch_bounds__(wgmma_threads(kConfig), 1)
    wgmma_product(const __grid_constant__ WgmmaArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  static_assert(sizeof(WgmmaShared) <= 256);
  WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + wgmma_barriers_at(kFormat, kConfig));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kConfig.stages; ++i) {
      shared.full[i].init(WgmmaStage<kFormat, kConfig>::kFullArrivals + 1);
      shared.empty[i].init(4 * kConfig.groups);
    }
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  tile::let_next_kernel_start();
  tile::wait_for_earlier_kernels();
  const uint32_t tiles = ptx::shared_address(memory);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == kConfig.groups) {
    ptx::setmaxnreg_dec<kWgmmaCopyRegisters>();
    if (threadIdx.x % 128 < 32) produce<kFormat, kConfig>(arguments, shared, tiles);
  } else {
    ptx::setmaxnreg_inc<wgmma_registers(kConfig)>();
    WgmmaConsumer<T, kFormat, kConfig>(arguments, shared, tiles,
                                       reinterpret_cast<float*>(memory + wgmma_boxes_at(kFormat, kConfig)))
        .run();
  }
}

}  // namespace kernel_pytorch::quantized_matmul
