// What host and device agree on for the forward in FP8 on Hopper. A block of threads holds 128 queries, 64 to each of
// two warpgroups, and walks over keys 128 at a time: the rows that share a scale. Rows of codes are 128 bytes.
#pragma once

#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention::fp8 {

inline constexpr int kTile = 128;      // queries, keys, and bytes of a row
inline constexpr int kWarpgroups = 2;  // that compute
inline constexpr int kThreads = 128 * (kWarpgroups + 1);
inline constexpr int kTileBytes = kTile * 128;
inline constexpr int kQueryBuffers = 2;

struct ForwardConfig {
  int value_size = 128;   // of the tile: 64 or 128
  int stages = 4;         // blocks of keys, and of values, in shared memory
  bool in_turns = false;  // warpgroups issue their products one after the other
};

KP_SHARED_CODE constexpr int value_bytes(ForwardConfig config) {
  return config.value_size * 128;
}
KP_SHARED_CODE constexpr int keys_at(ForwardConfig) {
  return kQueryBuffers * kTileBytes;
}
KP_SHARED_CODE constexpr int values_at(ForwardConfig config) {
  return keys_at(config) + config.stages * kTileBytes;
}
KP_SHARED_CODE constexpr int tile_bytes(ForwardConfig config) {
  return values_at(config) + config.stages * value_bytes(config);
}
KP_SHARED_CODE constexpr int shared_bytes(ForwardConfig config) {
  return tile_bytes(config) + kSm90BarrierBytes;
}

// `base`: maps of codes, order of tiles, bounds of scores, where results go. Scales are those of blocks of 128 rows.
struct ForwardArguments {
  Sm90ForwardArguments base;
  const float* query_scales;  // [batch, heads, query blocks]
  const float* key_scales;    // [batch, key heads, key blocks]
  const float* value_scales;
  int32_t key_blocks;
};

}  // namespace kernel_pytorch::attention::fp8
