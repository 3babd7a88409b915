// What host and device agree on for the forward on Hopper: the tile and pipeline of each head size, how shared memory
// is laid out, and the kernel's arguments.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

// A block of threads holds `warpgroups` times 64 queries and walks over keys in blocks, the copy engine `stages` ahead.
struct Sm90Config {
  int head_size = 64, value_size = 64;  // of the tile; smaller sizes are filled up with zeros
  int warpgroups = 2;                   // that compute, 64 queries each
  int key_block = 64;                   // keys of a step
  int stages = 2;                       // blocks of keys, and of values, in shared memory
  int query_buffers = 1;
  bool query_in_registers = false;  // else the product reads it from shared memory
  bool in_turns = false;            // warpgroups issue their products one after the other
};

KP_SHARED_CODE constexpr int sm90_chunks(int size) {
  return (size + 63) / 64;
}
KP_SHARED_CODE constexpr int sm90_queries(Sm90Config config) {
  return 64 * config.warpgroups;
}
KP_SHARED_CODE constexpr int sm90_threads(Sm90Config config) {
  return 128 * (config.warpgroups + 1);
}
KP_SHARED_CODE constexpr int sm90_query_bytes(Sm90Config config) {
  return sm90_queries(config) * sm90_chunks(config.head_size) * 128;
}
KP_SHARED_CODE constexpr int sm90_key_bytes(Sm90Config config) {
  return config.key_block * sm90_chunks(config.head_size) * 128;
}
KP_SHARED_CODE constexpr int sm90_value_bytes(Sm90Config config) {
  return config.key_block * sm90_chunks(config.value_size) * 128;
}
// Tiles first, each at a multiple of 1024 bytes, then barriers.
KP_SHARED_CODE constexpr int sm90_keys_at(Sm90Config config) {
  return config.query_buffers * sm90_query_bytes(config);
}
KP_SHARED_CODE constexpr int sm90_values_at(Sm90Config config) {
  return sm90_keys_at(config) + config.stages * sm90_key_bytes(config);
}
KP_SHARED_CODE constexpr int sm90_tile_bytes(Sm90Config config) {
  return sm90_values_at(config) + config.stages * sm90_value_bytes(config);
}
inline constexpr int kSm90BarrierBytes = 3072;
inline constexpr int kSm90SharedLimit = 232448;  // of a block on compute capability 9.0
KP_SHARED_CODE constexpr int sm90_shared_bytes(Sm90Config config) {
  return sm90_tile_bytes(config) + kSm90BarrierBytes;
}
KP_SHARED_CODE constexpr bool is_legal(Sm90Config config) {
  return sm90_shared_bytes(config) <= kSm90SharedLimit && config.key_block % 16 == 0 && config.stages >= 2 &&
         (config.warpgroups == 2 || config.warpgroups == 3) &&
         (!config.query_in_registers || config.query_buffers == 1);
}

// In which order tiles of queries are taken: heads in sections whose keys and values fit L2 together; in a section the
// longest rows of every head first (causal), or head after head.
struct Sm90Order {
  int32_t query_tiles;    // of a head
  int32_t heads;          // batches * heads
  int32_t section_heads;  // of a section
  int32_t total;
  bool longest_first;
};

// The tiles of packed sequences, of one head, longest first (attention/sm90/forward/plan.cuh).
struct Sm90PlannedTile {
  int32_t sequence, query_tile;
};
struct Sm90Plan {
  int32_t count, unused;
  Sm90PlannedTile tiles[1];  // `count` of them
};

struct Sm90ForwardArguments {
  tile::TensorMap query, key, value;
  ScoreArguments score;
  float exponent_scale;  // of scores in base 2: 1 where change_scores has multiplied already
  Sm90Order order;
  void* output;
  int64_t output_batch, output_head, output_query;  // strides in elements
  int32_t value_size;
  float* lse;              // null: not wanted
  const Sm90Plan* plan;    // packed sequences; else null
  const int32_t* places;   // of tiles with lists, in the order in which they are taken; or null
  int32_t* redo_links;     // one for each tile
  bool careful;            // every block with its running maximum: a row's bits depend on nothing but the row
  bool accumulates;        // output, then fp32, and lse are added to
  uint8_t* stored;         // then: for each tile and warp, whether its rows were in range when they were first done
  uint32_t counter_index;  // of the kernel's tile counters: launches in flight need different ones
};
inline constexpr int kSm90Counters = 4096;

}  // namespace kernel_pytorch::attention
