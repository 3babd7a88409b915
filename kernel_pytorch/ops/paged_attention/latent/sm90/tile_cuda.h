// What host and device agree on for attention over latent rows on Hopper.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::paged_attention {

inline constexpr int kLatentRows = 64;        // of queries, of a block
inline constexpr int kLatentKeys = 64;        // of a block of keys; a step is two of them
inline constexpr int kLatentValueChunks = 8;  // of 64 columns
inline constexpr int kLatentCopyWarps = 4;
inline constexpr int kLatentThreads = 3 * 128;  // two warpgroups multiply, one copies
inline constexpr int kLatentChunkBytes = kLatentRows * 128;
inline constexpr int kLatentTileBytes = (kLatentValueChunks + 1) * kLatentChunkBytes;
inline constexpr int kLatentNotes = 10080;
inline constexpr int kLatentSharedBytes = 3 * kLatentTileBytes + kLatentNotes;

// Blocks that take the same keys at the same time, for more rows than one holds: the second finds them in the L2 cache,
// or both are a cluster, in which each block reads half of the keys for both.
KP_SHARED_CODE constexpr int latent_share(const Tile& tile) {
  return tile_rows(tile) / kLatentRows;
}

struct LatentArguments {
  WorkArguments work;
  tile::TensorMap latent, rope;  // of boxes of 64 rows, where the copy engine moves keys
};

}  // namespace kernel_pytorch::paged_attention
