// The producer of a scan by chunks: which tokens a block has, and the warp that drives the copy engine over them and
// sums gates. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/linear_attention/cuda/sequence.cuh"
#include "kernel_pytorch/ops/linear_attention/sm90/chunk_cuda.h"

namespace kernel_pytorch::linear_attention {

struct ChunkShared {
  tile::Barrier full[4], empty[4];
  unsigned char unused[64];
  float sums[4][kSm90Chunk];  // of gates in base 2, of each stage; of a decay: the first
};
static_assert(sizeof(ChunkShared) == kChunkBarrierBytes);

// The tokens of a block, cut into chunks from the first on.
struct Stretch {
  int64_t batch, begin, end;
  int32_t chunks;
  // The chunk that comes as number `i`.
  __device__ __forceinline__ int32_t chunk(int32_t i, bool backwards) const { return backwards ? chunks - 1 - i : i; }
};
__device__ __forceinline__ Stretch stretch_of(const ChunkArguments& arguments) {
  const int64_t index = blockIdx.x / arguments.segments, segment = blockIdx.x % arguments.segments;
  const Span span = span_of(arguments.scan, index / arguments.scan.heads);
  const int64_t all = (span.end - span.begin + kSm90Chunk - 1) / kSm90Chunk;
  const int64_t each = (all + arguments.segments - 1) / arguments.segments * kSm90Chunk;
  int64_t begin = span.begin + segment * each, end = begin + each;
  begin = begin < span.end ? begin : span.end;
  end = end < span.end ? end : span.end;
  return {span.batch, begin, end, static_cast<int32_t>((end - begin + kSm90Chunk - 1) / kSm90Chunk)};
}
__device__ __forceinline__ int head_of_block(const ChunkArguments& arguments) {
  return static_cast<int>(blockIdx.x / arguments.segments % arguments.scan.heads);
}

// By one whole warp.
template <class T, ChunkConfig kConfig>
__device__ __forceinline__ void produce(const ChunkArguments& arguments, ChunkShared& shared, uint32_t tiles) {
  const ScanArguments& scan = arguments.scan;
  const Stretch stretch = stretch_of(arguments);
  const int lane = threadIdx.x % 32, head = head_of_block(arguments);
  const int32_t tensor = static_cast<int32_t>(stretch.batch);
  const int32_t first_value = blockIdx.y * kConfig.warpgroups * kSm90Values;
  constexpr int kTileBytes = kSm90Chunk * tile::kChunkRowBytes;
  tile::PipelineState state;
#pragma unroll 1
  for (int32_t i = 0; i < stretch.chunks; ++i) {
    const int64_t first = stretch.begin + static_cast<int64_t>(stretch.chunk(i, scan.backwards)) * kSm90Chunk;
    const int32_t row = static_cast<int32_t>(first);
    shared.empty[state.stage].wait(state.parity ^ 1);
    if (lane == 0) {
      uint32_t target = tiles + state.stage * stage_bytes(kConfig);
      const uint32_t full = shared.full[state.stage].address();
      shared.full[state.stage].arrive_expect_bytes(stage_bytes(kConfig));
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
    if constexpr (kConfig.gates == Gates::kToken) {
      // Two neighbouring tokens a lane; gates behind the end are none.
      float gates[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t token = first + 2 * lane + k;
        gates[k] = 0;
        if (token < stretch.end) gates[k] = finite_gate(scalar_gate<T>(scan, stretch.batch, token, head)) * kLog2OfE;
      }
      float sum = gates[0] + gates[1];
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
      }
      shared.sums[state.stage][2 * lane] = sum - gates[1];
      shared.sums[state.stage][2 * lane + 1] = sum;
      __syncwarp();
      if (lane == 0) shared.full[state.stage].arrive();
    }
    state.advance(chunk_stages(kConfig));
  }
}

}  // namespace kernel_pytorch::linear_attention
