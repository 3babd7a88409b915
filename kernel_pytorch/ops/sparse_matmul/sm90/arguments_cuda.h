// What host and device agree on about the product with a 2:4 weight on Hopper. The weight is the first operand of the
// matrix instructions, the only one that can be sparse: its rows, the output's columns, are the product's m here, and
// rows of x its n. Host and device.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/sm90/tile_cuda.h"

namespace kernel_pytorch::sparse_matmul {

// A block multiplies 128 rows of the weight, 64 a warpgroup, with `rows` rows of x, and walks along k in stages of 64
// columns, of which 32 are kept. Two blocks of a cluster have one tile of x, of which each reads half.
struct Config {
  int rows = 256;
  int stages = 4;
  int cluster = 2;
  int boxes = 2;  // of a warpgroup, for results on their way out
};

inline constexpr int kWeightRows = 128;
inline constexpr int kStageColumns = 64;
inline constexpr int kWeightBytes = kWeightRows * kStageColumns;  // of a stage: half of the columns, two bytes each
inline constexpr int kMetadataBytes = kWeightRows * kStageColumns / 8;
inline constexpr int kBoxRows = 64;  // of x, in a box on its way out: 64 columns of the output each
inline constexpr int kBoxBytes = kBoxRows * 128;

KP_SHARED_CODE constexpr int x_bytes(Config config) {
  return config.rows * 2 * kStageColumns;
}
KP_SHARED_CODE constexpr int stage_bytes(Config config) {
  return kWeightBytes + x_bytes(config);
}
// Stages first, each operand at a multiple of 1024 bytes, then boxes, metadata, barriers.
KP_SHARED_CODE constexpr int boxes_at(Config config) {
  return config.stages * stage_bytes(config);
}
KP_SHARED_CODE constexpr int metadata_at(Config config) {
  return boxes_at(config) + product::kSm90Warpgroups * config.boxes * kBoxBytes;
}
KP_SHARED_CODE constexpr int barriers_at(Config config) {
  return metadata_at(config) + config.stages * kMetadataBytes;
}
KP_SHARED_CODE constexpr int shared_bytes(Config config) {
  return barriers_at(config) + product::kSm90BarrierBytes;
}
KP_SHARED_CODE constexpr bool is_legal(Config config) {
  return shared_bytes(config) <= product::kSm90SharedLimit && config.stages >= 3 && config.stages <= 16 &&
         (config.rows == 64 || config.rows == 128 || config.rows == 256) &&
         (config.cluster == 1 || config.cluster == 2) && (config.boxes == 1 || config.boxes == 2);
}
// How the engine's walk sees the tiles.
KP_SHARED_CODE constexpr product::Sm90Config walk_config(Config config) {
  return {.tile_m = kWeightRows, .tile_n = config.rows, .stages = config.stages, .cluster = config.cluster};
}

struct Arguments {
  product::Sm90Arguments product;  // a: values, b: x, their maps; m, n, k_stages, order, bias
  const uint32_t* metadata;
};

}  // namespace kernel_pytorch::sparse_matmul
