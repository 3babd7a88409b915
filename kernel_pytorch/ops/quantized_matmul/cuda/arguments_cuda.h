// What host and device agree on for products with a weight in few bits.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::quantized_matmul {

struct WeightArguments {
  const uint8_t* codes;
  int64_t code_stride;        // bytes from a row to the next
  const void* scales;         // bytes, or of x's type
  const uint8_t* zeros;       // or null
  const float* tensor_scale;  // or null
  int32_t group, groups;      // columns of a group, groups of a row
};
struct Arguments {
  product::TileArguments tile;  // of its operands only a, which is x
  WeightArguments weight;
};

inline constexpr int kPartPadding = 4;  // floats after a row of sums: four lanes write to different banks

// Of one block of threads for at most 16 rows: columns of the output; warps, which divide k; blocks of k whose codes a
// warp has in flight.
struct ThinConfig {
  int columns = 16;
  int warps = 8;
  int blocks = 4;
};
KP_SHARED_CODE constexpr bool is_legal(const ThinConfig& config) {
  return (config.columns == 16 || config.columns == 32 || config.columns == 64) &&
         (config.warps == 4 || config.warps == 8) && config.columns * config.blocks <= 64;
}

// Of a lane in a stage of its ring: 16 bytes of codes and four that have its scale, of each of `chunks` rows of the
// weight; four with its zero where the format has any.
KP_SHARED_CODE constexpr int ring_lane_bytes(group_format::Format format, int chunks) {
  return chunks * (16 + 4 + (group_format::is_integer(format) ? 4 : 0));
}

// For fewer rows by blocks that stay on their multiprocessor and take tiles of columns in turns. Warps divide k, and
// the others columns; each has `stages` of 16 * tiles rows of the weight in a ring of its own.
inline constexpr int kStreamRows = 8;  // of a product by mma; there are fewer of x
struct StreamConfig {
  int warps = 16;
  int k_warps = 4;
  int tiles = 1;
  int stages = 4;
};
KP_SHARED_CODE constexpr bool is_legal(const StreamConfig& config) {
  return (config.warps == 16 || config.warps == 32) &&
         (config.k_warps == 4 || config.k_warps == 8 || config.k_warps == 16) &&
         (config.tiles == 1 || config.tiles == 2) && config.stages >= 2 && config.stages <= 8;
}
KP_SHARED_CODE constexpr int stream_columns(const StreamConfig& config) {
  return config.warps / config.k_warps * 16 * config.tiles;
}
KP_SHARED_CODE constexpr int stream_ring_bytes(group_format::Format format, const StreamConfig& config) {
  return config.warps * config.stages * 32 * ring_lane_bytes(format, 2 * config.tiles);
}
KP_SHARED_CODE constexpr int stream_part_bytes(const StreamConfig& config) {
  return 2 * config.k_warps * kStreamRows * (stream_columns(config) + kPartPadding) * 4;
}
struct StreamArguments {
  Arguments product;
  int32_t tiles;       // of columns
  int32_t rounds;      // blocks of k of a warp
  int32_t parts;       // of k, which are of different blocks of threads
  float* sums;         // [tiles, parts, rows, columns], where there is more than one part
  uint32_t* counters;  // of tiles, zeros
};

// For more rows: four warps have 64 rows of x and 64 or 128 columns of the output.
inline constexpr int kMmaRows = 64;
inline constexpr int kMmaThreads = 128;
inline constexpr int kMmaStages = 3;
struct MmaConfig {
  int columns = 128;
};
KP_SHARED_CODE constexpr bool is_legal(const MmaConfig& config) {
  return config.columns == 64 || config.columns == 128;
}

// The same on Hopper: warpgroups have 64 rows of the weight each, and a tile of rows of x lies in shared memory, where
// one more warpgroup's first thread has it put.
// Blocks divide all steps of all tiles evenly; where a tile is of several blocks the last one adds their sums.
inline constexpr int kWgmmaBoxRows = 32;  // of x on their way out
struct WgmmaConfig {
  int rows = 64;  // of x in a tile
  int groups = 4;
  int stages = 4;
};
KP_SHARED_CODE constexpr bool is_legal(const WgmmaConfig& config) {
  return (config.rows == 32 || config.rows == 64 || config.rows == 96 || config.rows == 128) &&
         (config.groups == 3 || config.groups == 4) && config.stages >= 2 && config.stages <= 6;
}
// One warpgroup more: it gives its registers to the others. A launch is given what its threads leave to each.
KP_SHARED_CODE constexpr int wgmma_threads(const WgmmaConfig& config) {
  return (config.groups + 1) * 128;
}
inline constexpr int kWgmmaCopyRegisters = 24;
KP_SHARED_CODE constexpr int wgmma_registers(const WgmmaConfig& config) {
  const int launched = 65536 / wgmma_threads(config) / 8 * 8;
  return ((config.groups + 1) * launched - kWgmmaCopyRegisters) / config.groups / 8 * 8;
}
struct WgmmaArguments {
  tile::TensorMap x;  // arranged
  Arguments product;
  int32_t tiles, row_tiles;  // tiles in all, and of rows of x
  int32_t steps;             // of k in a tile
  int32_t steps_each;        // of a block
  int32_t most;              // blocks that a tile can be of
  float* sums;               // [tiles, most, warpgroups, values of a thread / 4, 128] of four
  uint32_t* counters;        // [tiles, warpgroups], zeros
};
// x with the columns of each block of k in the order in which mma takes them from lanes; zeros behind the last.
struct ArrangeArguments {
  const void* x;
  void* output;
  int64_t x_stride, output_stride;
  int32_t rows, k, units;  // units of 16 bytes of a row of the output
};

// Columns of k that one load of 16 bytes by each of the four lanes of a row covers.
KP_SHARED_CODE constexpr int span_of(group_format::Format format) {
  return 4 * 16 * group_format::codes_in_byte(format);
}
// Bytes of a row of x in shared memory: neighbouring rows lie 64 bytes apart modulo 128, so that eight lanes of two
// rows read 128 bytes at once.
KP_SHARED_CODE constexpr int mma_pitch(group_format::Format format) {
  return span_of(format) * 2 + 64;
}
KP_SHARED_CODE constexpr int mma_shared_bytes(group_format::Format format, int columns) {
  const int stages = kMmaStages * kMmaRows * mma_pitch(format), sums = kMmaRows * (columns + kPartPadding) * 4;
  return stages > sums ? stages : sums;
}

// Stages of x, each of its blocks of 64 columns at a multiple of 1024 bytes; lanes' rings; boxes of sums; barriers.
KP_SHARED_CODE constexpr int wgmma_x_bytes(group_format::Format format, const WgmmaConfig& config) {
  return config.rows * span_of(format) * 2;
}
KP_SHARED_CODE constexpr int wgmma_ring_at(group_format::Format format, const WgmmaConfig& config) {
  return config.stages * wgmma_x_bytes(format, config);
}
KP_SHARED_CODE constexpr int wgmma_warp_ring_bytes(group_format::Format format, const WgmmaConfig& config) {
  return config.stages * 32 * ring_lane_bytes(format, 2);
}
KP_SHARED_CODE constexpr int wgmma_boxes_at(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_ring_at(format, config) + 4 * config.groups * wgmma_warp_ring_bytes(format, config);
}
KP_SHARED_CODE constexpr int wgmma_box_bytes() {
  return kWgmmaBoxRows * (64 + kPartPadding) * 4;
}
KP_SHARED_CODE constexpr int wgmma_barriers_at(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_boxes_at(format, config) + config.groups * wgmma_box_bytes();
}
KP_SHARED_CODE constexpr int wgmma_shared_bytes(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_barriers_at(format, config) + 256;
}

}  // namespace kernel_pytorch::quantized_matmul
