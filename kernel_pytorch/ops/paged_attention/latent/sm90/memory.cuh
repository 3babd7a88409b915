// Shared memory of a block of attention over latent rows on Hopper: 64 rows of queries and two blocks of 64 keys, each
// in nine chunks of 64 columns (tile/matrix_descriptor.cuh), and what the warps tell each other.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/tile_cuda.h"
#include "kernel_pytorch/ops/paged_attention/sm90/piece.cuh"

namespace kernel_pytorch::paged_attention {

// A block of keys comes and goes in two parts: the columns of values that the first warpgroup multiplies, and those of
// the second. The rope columns belong to the part that the warpgroup without these scores gives back, because the
// weights take their place once the scores are known.
enum LatentPart { kFirstLeft, kFirstRight, kSecondLeft, kSecondRight, kLatentParts };

// What a warp is at. It stands in shared memory because registers are short.
struct LatentPiece {
  int64_t next_unit;  // of the workers' units
  float* result;      // null: a whole segment, whose rows go to the output
  Request request;
  int32_t first_row, last_row;  // of the request's rows, of this block
  Steps steps;
  uint32_t next_worker;
};

struct LatentShared {
  tile::Barrier full[kLatentParts], empty[kLatentParts];
  uint16_t presence[2][kLatentCopyWarps];  // a bit of each key of a block: whether it is there
  float largest[2][kLatentRows];           // of the scores so far, after the first block and after the second
  float sums[2][kLatentRows];
  LatentPiece pieces[kLatentThreads / 32];
  int64_t plan[kSharedRequests + 1];
};
static_assert(sizeof(LatentShared) <= kLatentNotes);

// Dynamic shared memory: queries, two blocks of keys, LatentShared.
struct LatentRoom {
  unsigned char* memory;

  __device__ __forceinline__ LatentShared& shared() const {
    return *reinterpret_cast<LatentShared*>(memory + 3 * kLatentTileBytes);
  }
  __device__ __forceinline__ LatentPiece& piece() const { return shared().pieces[threadIdx.x / 32]; }
  __device__ __forceinline__ uint32_t queries() const { return ptx::shared_address(memory); }
  __device__ __forceinline__ uint32_t keys(int block) const { return queries() + (1 + block) * kLatentTileBytes; }
  // Descriptors hold 18 bits of an address; those above name the block of a cluster.
  static __device__ __forceinline__ uint32_t described(uint32_t address) { return address & 0x3ffff; }
  __device__ __forceinline__ uint32_t chunk(int block, int index) const {
    return keys(block) + index * kLatentChunkBytes;
  }
  // Once the scores of the block are known, its weights.
  __device__ __forceinline__ uint32_t rope(int block) const { return chunk(block, kLatentValueChunks); }
};

}  // namespace kernel_pytorch::paged_attention
