// What host and device agree on for matrix products on Hopper (ops/matmul, ops/scaled_matmul): the tile and its ring of
// stages, what the operands are, what happens to a finished sum, and the kernel's arguments.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::product {  // A block multiplies tile_m x tile_n with two warpgroups, half of the rows each,
                                     // and walks along k in stages of 128
// bytes. Two blocks of a cluster read what they share once: b where they lie one below the other, a where they lie side
// by side. Or, where tiles are too few for the GPU, a cluster has one tile and each of its blocks a part of k: their
// sums meet in shared memory, 16 rows at one of them.
struct Sm90Config {
  int tile_m = 128, tile_n = 128;
  int stages = 4;
  int cluster = 1;       // blocks
  bool share_a = false;  // else blocks of a cluster share b
  bool factors = false;  // shared memory for block scales: per stage one per row of a and 128 of b
  bool splits = false;   // the blocks of a cluster have parts of k
};

// kFloat32: its upper 19 bits (tf32). kFloat32Parts: of every 128 bytes the first half are 16 floats' large parts, the
// second their small ones, and three products of parts make one of fp32 (sm90/split.cuh).
enum class Sm90Type : uint8_t { kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2, kFloat32, kFloat32Parts };

// What offsets on the device cut (ops/grouped_matmul): nothing; rows of a and of the output, each group of which has a
// matrix b of its own; or k, each group of which makes an output of its own.
enum class Sm90Grouping : uint8_t { kNone, kRows, kDepth };

// a_rows, b_columns: that dimension lies contiguous in memory instead of k (16-bit types only). b_pairs: b's map is
// [pairs, 2, k], columns of two matrices in turns. b_halves: of a tile's columns the second half are those that lie
// half of b's columns behind the first. gathers: lines of an operand are named by an index (kRows: a's rows, kDepth:
// steps of k).
struct Sm90Operands {
  Sm90Type a, b;
  bool a_rows, b_columns;
  bool b_pairs = false;
  bool b_halves = false;
  Sm90Grouping grouping = Sm90Grouping::kNone;
  bool gathers_a = false, gathers_b = false;
};

// kBlocks: a 1 x 128, b 128 x 128; kThinBlocks: both 1 x 128.
enum class Sm90Scaling : uint8_t { kNone, kTensor, kRows, kBlocks, kThinBlocks };

// As ops/matmul/matmul.h has them; kGatedHalves: gates are the first half of b's columns, with b_halves.
enum class Sm90Form : uint8_t { kPlain, kGated, kGradient, kGatedGradient, kGatedHalves };

// In this order: scale, bias, preactivation, form, residual.
struct Sm90Epilogue {
  Sm90Form form = Sm90Form::kPlain;
  pointwise::Kind kind = pointwise::Kind::kIdentity;
  bool bias = false;                                                     // [n]
  bool residual = false;                                                 // [batch, m, columns of the output]
  bool preactivation = false;                                            // written as well, in the output's type
  bool float_bias = false, float_residual = false, float_saved = false;  // else of the output's type
  bool whole_vectors = false;  // rows of auxiliary matrices are multiples of eight columns
  Sm90Scaling scaling = Sm90Scaling::kNone;
  bool promoted = false;  // sums leave the tensor core's accumulator after every stage
  bool amax = false;      // of the values before they are rounded
  bool grouped = false;   // rows end with their group, and each group has a bias of its own
  bool clamped = false;   // gates and ups are clamped (Sm90Groups::limit)
};

inline constexpr int kSm90Warpgroups = 2;
inline constexpr int kSm90Threads = 128 * (kSm90Warpgroups + 1);
inline constexpr int kSm90StageBytes = 128;  // of each row, along k
inline constexpr int kSm90BoxRows = 16;      // a warp's rows on their way out, 128 bytes of each
inline constexpr int kSm90BoxBytes = kSm90BoxRows * 128;
inline constexpr int kSm90BarrierBytes = 512;
inline constexpr int kSm90ColumnBytes = 1024;    // a warpgroup's values of columns: 256 floats
inline constexpr int kSm90SharedLimit = 232448;  // of a block on compute capability 9.0

KP_SHARED_CODE constexpr int sm90_a_bytes(Sm90Config config) {
  return config.tile_m * kSm90StageBytes;
}
KP_SHARED_CODE constexpr int sm90_b_bytes(Sm90Config config) {
  return config.tile_n * kSm90StageBytes;
}
KP_SHARED_CODE constexpr int sm90_boxes(Sm90Config config) {  // of a warp
  return config.factors ? 1 : 2;
}
KP_SHARED_CODE constexpr int sm90_factor_bytes(Sm90Config config) {
  return config.factors ? (config.tile_m + config.tile_n) * 4 : 0;
}
// Stages first, each operand at a multiple of 1024 bytes, then boxes, barriers, columns, factors.
KP_SHARED_CODE constexpr int sm90_boxes_at(Sm90Config config) {
  return config.stages * (sm90_a_bytes(config) + sm90_b_bytes(config));
}
KP_SHARED_CODE constexpr int sm90_barriers_at(Sm90Config config) {
  return sm90_boxes_at(config) + 4 * kSm90Warpgroups * sm90_boxes(config) * kSm90BoxBytes;
}
KP_SHARED_CODE constexpr int sm90_columns_at(Sm90Config config) {
  return sm90_barriers_at(config) + kSm90BarrierBytes;
}
KP_SHARED_CODE constexpr int sm90_factors_at(Sm90Config config) {
  return sm90_columns_at(config) + kSm90Warpgroups * kSm90ColumnBytes;
}
KP_SHARED_CODE constexpr int sm90_exchange_at(Sm90Config config) {
  return sm90_factors_at(config) + config.stages * sm90_factor_bytes(config);
}
// Blocks that read something together, and those that have parts of k.
KP_SHARED_CODE constexpr int sm90_sharing(Sm90Config config) {
  return config.splits ? 1 : config.cluster;
}
KP_SHARED_CODE constexpr int sm90_parts(Sm90Config config) {
  return config.splits ? config.cluster : 1;
}
// A warp's sums of one part, and what a block receives: of each warp that it finishes, those of the other parts.
KP_SHARED_CODE constexpr int sm90_part_bytes(Sm90Config config) {
  return 16 * config.tile_n * 4;
}
KP_SHARED_CODE constexpr int sm90_finished_warps(Sm90Config config) {
  return (4 * kSm90Warpgroups + sm90_parts(config) - 1) / sm90_parts(config);
}
KP_SHARED_CODE constexpr int sm90_shared_bytes(Sm90Config config) {
  return sm90_exchange_at(config) + (sm90_parts(config) - 1) * sm90_finished_warps(config) * sm90_part_bytes(config);
}
// Blocks of a cluster that lie side by side and one below the other.
KP_SHARED_CODE constexpr int sm90_across(Sm90Config config) {
  return config.share_a ? sm90_sharing(config) : 1;
}
KP_SHARED_CODE constexpr int sm90_down(Sm90Config config) {
  return config.share_a ? 1 : sm90_sharing(config);
}
KP_SHARED_CODE constexpr bool is_legal(Sm90Config config) {
  return sm90_shared_bytes(config) <= kSm90SharedLimit && config.stages >= 2 && config.stages <= 16 &&
         (config.tile_m == 128 || config.tile_m == 256) &&
         (config.tile_n == 128 || config.tile_n == 192 || config.tile_n == 256) &&
         config.tile_m + config.tile_n <= 384 && (config.cluster == 1 || config.cluster == 2 || config.splits) &&
         (!config.splits || (config.tile_m == 128 && !config.factors && config.cluster >= 2 && config.cluster <= 8));
}

// Clusters take tiles in groups of `group` along m, so that what runs together shares rows and columns in L2.
struct Sm90Order {
  int32_t tiles_m, tiles_n;  // in clusters
  int32_t batches;
  int32_t group;
  int32_t total;
};

// An auxiliary matrix of the epilogue: element (batch, row, column) is at batch * batch_stride + row * row_stride +
// column.
struct Sm90Auxiliary {
  const void* data;
  int64_t batch_stride, row_stride;
};

// Group g is rows (or steps of k) [ends[g - 1], ends[g]) of `rows`. What the copy engine cannot do is done by threads,
// who need addresses: lines that are gathered or stand at a group's end. Strides in elements.
struct Sm90Groups {
  const int32_t* ends;
  const int32_t* gather_a;
  const int32_t* gather_b;
  int32_t count, rows;
  int32_t depth;  // k, of kRows
  const void* a;
  const void* b;
  int64_t a_stride, b_stride;  // from a line to the next: of kRows a row, of kDepth a step of k
  void* output;
  void* preactivation;
  int64_t output_stride, preactivation_stride, bias_stride;
  int64_t scale_b_stride;  // from a matrix's scales to the next's
  float limit, slope;      // of clamped gates g sigmoid(slope g), g at most limit, and ups u + 1, |u| at most limit
};

struct Sm90Arguments {
  tile::TensorMap a, b, output, preactivation;
  Sm90Order order;
  int32_t m, n;                  // n of the sums
  int32_t k_stages;              // at least 1
  int32_t a_batched, b_batched;  // 0: every batch reads the same
  int32_t gates_are_second;      // of each pair of columns, for kGated
  float alpha, beta;
  const void* bias;
  Sm90Auxiliary residual, saved;
  const float* scale_a;
  const float* scale_b;
  int32_t scale_a_row, scale_a_block, scale_b_row, scale_b_block;  // strides
  int32_t scale_a_shift;      // 7 where a row of a's scales stands for 128 (blocks only)
  const float* output_scale;  // null: 1
  float* amax;
  Sm90Groups groups;
  const int32_t* careful;  // of parts: where this is not 0, another kernel computes the product
};

}  // namespace kernel_pytorch::product
