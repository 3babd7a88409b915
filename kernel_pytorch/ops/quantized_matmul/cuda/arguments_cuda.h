// What host and device agree on for products with a weight in few bits.
#pragma once

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

}  // namespace kernel_pytorch::quantized_matmul
