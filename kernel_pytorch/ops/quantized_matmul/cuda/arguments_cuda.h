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
  int32_t group_shift;
  int32_t scale_piece, zero_piece;  // bytes that are copied at once: 4, 8 or 16
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

// For codes of 2, 3, 5 and 6 bits and at most 16 rows: threads of a block, rows of the weight of a warp, rows of x at a
// time.
inline constexpr int kBitsThreads = 128;
inline constexpr int kBitsColumns = 4;
inline constexpr int kBitsMostRows = 8;

// Bytes of a row of the weight that four lanes take at once; columns of k that these are.
inline constexpr int kSpanBytes = 64;
KP_SHARED_CODE constexpr int span_of(group_format::Format format) {
  return kSpanBytes * group_format::codes_in_byte(format);
}

// A stage of the weight in shared memory: codes of rows and of blocks of k, then windows of scales and of zeros, of
// which eight rows lie in different banks.
struct WeightStageLayout {
  int scale_pitch, zero_pitch;
  int scales_at, zeros_at, bytes;
};
KP_SHARED_CODE constexpr int window_pitch(int bytes) {
  return bytes <= 4 ? 4 : bytes <= 16 ? bytes : bytes + 16;
}
KP_SHARED_CODE constexpr WeightStageLayout stage_layout(group_format::Format format, int rows, int spans) {
  const bool is_integer = group_format::is_integer(format);
  const int groups = spans * span_of(format) / (format == group_format::Format::kNvfp4 ? 16 : 32);
  WeightStageLayout layout{window_pitch(groups * (is_integer ? 2 : 1)), is_integer ? window_pitch(groups) : 0, 0, 0, 0};
  layout.scales_at = rows * spans * kSpanBytes;
  layout.zeros_at = layout.scales_at + rows * layout.scale_pitch;
  layout.bytes = (layout.zeros_at + rows * layout.zero_pitch + 1023) / 1024 * 1024;
  return layout;
}

// Blocks divide the steps of all tiles evenly; where a tile is of several blocks the last one adds their sums.
struct WalkArguments {
  int32_t tiles;
  int32_t steps;       // of k in a tile
  int32_t steps_each;  // of a block
  int32_t most;        // blocks that a tile can be of, at most
};

// For one or two rows by blocks that stay on their multiprocessor. Warps divide a stage: k_warps its blocks of k, the
// others its rows, of which each has 16 * tiles. One more warp fills stages. box: bytes of a row in a box of codes.
inline constexpr int kStreamRows = 8;  // of a product by mma; there are fewer of x
inline constexpr int kMostStages = 8;
struct StreamConfig {
  int warps = 8;
  int k_warps = 8;
  int tiles = 4;
  int stages = 4;
  int box = 128;
};
KP_SHARED_CODE constexpr bool is_legal(const StreamConfig& config) {
  return (config.warps == 8 || config.warps == 16) && config.warps % config.k_warps == 0 &&
         (config.tiles == 1 || config.tiles == 2 || config.tiles == 4) && config.stages >= 2 &&
         config.stages <= kMostStages && (config.box == 64 || (config.box == 128 && config.k_warps % 2 == 0));
}
KP_SHARED_CODE constexpr int stream_columns(const StreamConfig& config) {
  return config.warps / config.k_warps * 16 * config.tiles;
}
KP_SHARED_CODE constexpr int stream_stage_bytes(group_format::Format format, const StreamConfig& config) {
  return stage_layout(format, stream_columns(config), config.k_warps).bytes;
}
KP_SHARED_CODE constexpr int stream_ring_bytes(group_format::Format format, const StreamConfig& config) {
  return config.stages * stream_stage_bytes(format, config);
}
// Two sets of sums of warps that divide k. `rows`: of x, eight or one.
KP_SHARED_CODE constexpr int stream_part_bytes(const StreamConfig& config, int rows) {
  return 2 * config.k_warps * rows * (stream_columns(config) + kPartPadding) * 4;
}
inline constexpr int kStreamBarrierBytes = 256;
// How scales meet codes: as products of pairs before mma; of int4, whose groups are blocks of k, applied to sums; of
// E2M1 and one row of x too, where each group has a column of mma's second operand to itself.
enum class StreamScaling : uint8_t { kPairs, kSums, kColumns };
struct StreamArguments {
  tile::TensorMap codes;
  Arguments product;
  WalkArguments walk;
  int32_t parts;       // of k, which are of different blocks of threads
  float* sums;         // [tiles, parts * walk.most, rows, columns], where a tile is of several blocks
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
// one more warpgroup's first warp has it put, and the weight.
struct WgmmaConfig {
  int rows = 64;  // of x in a tile
  int groups = 4;
  int stages = 4;
  int spans = 1;  // blocks of k in a stage
  int sets = 1;   // of sums, added in the end: a product need not wait for the sums of the one before it
};
// Rows of x on their way out; each box of them is code of its own, and the shared memory is the stages'.
KP_SHARED_CODE constexpr int wgmma_box_rows(const WgmmaConfig& config) {
  return config.rows < 32 || config.spans == 2 ? 16 : 32;
}
inline constexpr int kWgmmaBoxPitch = 64 + 2;
KP_SHARED_CODE constexpr bool is_legal(const WgmmaConfig& config) {
  return (config.rows == 16 || config.rows == 32 || config.rows == 64 || config.rows == 96 || config.rows == 128) &&
         (config.groups == 3 || config.groups == 4) && config.stages >= 2 && config.stages <= kMostStages &&
         (config.spans == 1 || config.spans == 2) &&
         (config.sets == 1 || (config.sets == 2 && config.rows * config.groups <= 192));
}
// One warpgroup more: it gives its registers to the others. A launch is given what its threads leave to each.
KP_SHARED_CODE constexpr int wgmma_threads(const WgmmaConfig& config) {
  return (config.groups + 1) * 128;
}
inline constexpr int kWgmmaCopyRegisters = 56;  // addresses of scales are 64-bit
KP_SHARED_CODE constexpr int wgmma_registers(const WgmmaConfig& config) {
  const int launched = 65536 / wgmma_threads(config) / 8 * 8;
  return ((config.groups + 1) * launched - kWgmmaCopyRegisters) / config.groups / 8 * 8;
}
struct WgmmaArguments {
  tile::TensorMap x;  // arranged
  tile::TensorMap codes;
  Arguments product;
  WalkArguments walk;
  int32_t row_tiles;   // tiles of rows of x
  float* sums;         // [tiles, most, warpgroups, values of a thread / 4, 128] of four
  uint32_t* counters;  // [tiles, warpgroups], zeros
};
// x with the columns of each block of k in the order in which mma takes them from lanes; zeros behind the last.
struct ArrangeArguments {
  const void* x;
  void* output;
  int64_t x_stride, output_stride;
  int32_t rows, k, units;  // units of 16 bytes of a row of the output
};

// Bytes of a row of x in shared memory: neighbouring rows lie 64 bytes apart modulo 128, so that eight lanes of two
// rows read 128 bytes at once.
KP_SHARED_CODE constexpr int mma_pitch(group_format::Format format) {
  return span_of(format) * 2 + 64;
}
KP_SHARED_CODE constexpr int mma_shared_bytes(group_format::Format format, int columns) {
  const int stages = kMmaStages * kMmaRows * mma_pitch(format), sums = kMmaRows * (columns + kPartPadding) * 4;
  return stages > sums ? stages : sums;
}

// Stages of x, each of its blocks of 64 columns at a multiple of 1024 bytes; those of the weight; boxes of sums;
// barriers.
KP_SHARED_CODE constexpr int wgmma_x_bytes(group_format::Format format, const WgmmaConfig& config) {
  return config.rows * config.spans * span_of(format) * 2;
}
KP_SHARED_CODE constexpr int wgmma_ring_at(group_format::Format format, const WgmmaConfig& config) {
  return config.stages * wgmma_x_bytes(format, config);
}
KP_SHARED_CODE constexpr int wgmma_stage_bytes(group_format::Format format, const WgmmaConfig& config) {
  return stage_layout(format, config.groups * 64, config.spans).bytes;
}
KP_SHARED_CODE constexpr int wgmma_boxes_at(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_ring_at(format, config) + config.stages * wgmma_stage_bytes(format, config);
}
KP_SHARED_CODE constexpr int wgmma_box_bytes(const WgmmaConfig& config) {
  return wgmma_box_rows(config) * kWgmmaBoxPitch * 4;
}
KP_SHARED_CODE constexpr int wgmma_barriers_at(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_boxes_at(format, config) + config.groups * wgmma_box_bytes(config);
}
KP_SHARED_CODE constexpr int wgmma_shared_bytes(group_format::Format format, const WgmmaConfig& config) {
  return wgmma_barriers_at(format, config) + 256;
}

}  // namespace kernel_pytorch::quantized_matmul
