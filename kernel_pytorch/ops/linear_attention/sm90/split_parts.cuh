// What the warpgroups of a scan by chunks share (split.cuh), and the warp that drives the copy engine. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/linear_attention/sm90/producer.cuh"
#include "kernel_pytorch/ops/linear_attention/sm90/split_cuda.h"

namespace kernel_pytorch::linear_attention {

// A window is the part of a chunk whose gates sum to so little that e^(half of it) and its inverse are numbers of the
// element type: nearly always the whole chunk. Factors are read in pairs, hence aligned.
struct alignas(16) SplitSlot {
  float factors[128];  // what each gated channel of the state is multiplied by in front of the window
  int32_t begin, end;  // in the chunk
  bool is_last;        // of the chunk
};
struct SplitShared {
  tile::Barrier full[4], empty[4];                       // stages
  tile::Barrier ready[kSplitSlots], taken[kSplitSlots];  // windows
  SplitSlot slots[kSplitSlots];
  float after[128];   // what the state is multiplied by behind the last window
  float totals[256];  // gates of the parts of a chunk, or of the ends of a window
  float reach[4];     // the most that a warp's sums of gates are away from 0
  int32_t firsts[4];
  uint8_t bounds[kSm90Chunk + 1];  // of windows
};
static_assert(sizeof(SplitShared) <= kSplitSharedBytes);

inline constexpr int kScalerBarrier = 1, kStateBarrier = 2;  // named ones; each warpgroup of the state has its own

template <class T>
inline constexpr ptx::WgmmaType kSplitWgmmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kSplitWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

// Where fp32 factors of a warpgroup's output stand: rows of 256 bytes, units of 32 bytes swizzled by the row.
__device__ __forceinline__ uint32_t output_factor_offset(int row, int column) {
  return row * 256 + ((column / 8 ^ row & 7) << 5) + column % 8 * 4;
}

// By one whole warp: keys, values, queries of each chunk.
template <SplitConfig kConfig>
__device__ __forceinline__ void produce_chunks(const ChunkArguments& arguments, SplitShared& shared, uint32_t tiles) {
  const ScanArguments& scan = arguments.scan;
  const Stretch stretch = stretch_of(arguments);
  const int head = head_of_block(arguments);
  const int32_t tensor = static_cast<int32_t>(stretch.batch);
  const int32_t first_value = blockIdx.y * kConfig.warpgroups * kSm90Values;
  constexpr int kTileBytes = kSm90Chunk * tile::kChunkRowBytes;
  tile::PipelineState state;
#pragma unroll 1
  for (int32_t i = 0; i < stretch.chunks; ++i) {
    const int32_t row =
        static_cast<int32_t>(stretch.begin + static_cast<int64_t>(stretch.chunk(i, scan.backwards)) * kSm90Chunk);
    shared.empty[state.stage].wait(state.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      uint32_t target = tiles + state.stage * split_stage_bytes(kConfig);
      const uint32_t full = shared.full[state.stage].address();
      shared.full[state.stage].arrive_expect_bytes(split_stage_bytes(kConfig));
      const auto load = [&](const tile::TensorMap& map, int count, int32_t column, int32_t group) {
        for (int chunk = 0; chunk < count; ++chunk, target += kTileBytes) {
          ptx::cp_async_bulk_tensor_4d_shared_global(target, &map, column + chunk * tile::kChunkColumns, row,
                                                     head / group, tensor, full);
        }
      };
      load(arguments.key, kConfig.columns / 64, 0, scan.key.group);
      load(arguments.value, kConfig.warpgroups, first_value, scan.value.group);
      if constexpr (!kConfig.only_states) load(arguments.query, kConfig.columns / 64, 0, scan.query.group);
    }
    __syncwarp();
    state.advance(split_stages(kConfig));
  }
}

}  // namespace kernel_pytorch::linear_attention
