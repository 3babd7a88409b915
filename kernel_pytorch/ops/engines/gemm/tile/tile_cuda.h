// What host and device agree on for the plain matrix product on CUDA (ops/matmul, ops/scaled_matmul): it takes any
// types and strides, and every epilogue.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::product {

inline constexpr int kTileThreads = 256;
inline constexpr int kTileDepth = 16;        // of k at a time
inline constexpr int kTileScaleBlock = 128;  // of k that share scales of blocks
inline constexpr int kTileChain = 32;        // products that are summed one after another, without scales of blocks
inline constexpr int kTileRowsAtOnce = 64;   // of a finished tile in shared memory

// A thread has per_thread x per_thread sums.
KP_SHARED_CODE constexpr int tile_edge(int per_thread) {
  return 16 * per_thread;
}

// The same by mma: blocks of 128 x 128, and what one operand takes of a stage in shared memory.
inline constexpr int kMmaEdge = 128;
inline constexpr int kMmaDepth = 32;  // of k at a time
inline constexpr int kMmaStages = 3;
inline constexpr int kMmaOperandBytes = kMmaEdge * (kMmaDepth * 2 + 16);
inline constexpr int kMmaSharedBytes = kMmaStages * 2 * kMmaOperandBytes;
static_assert(kMmaSharedBytes >= kTileRowsAtOnce * kMmaEdge * 4);

// FP8 by mma (mma/float8_kernel.cuh): the same blocks; four stages fit into the 99 KiB of 8.9 and 12.x.
inline constexpr int kFloat8Depth = 64;
inline constexpr int kFloat8Stages = 4;
inline constexpr int kFloat8OperandBytes = kMmaEdge * (kFloat8Depth + 16);
inline constexpr int kFloat8SharedBytes = kFloat8Stages * 2 * kFloat8OperandBytes;
static_assert(kFloat8SharedBytes <= 99 * 1024 && kFloat8SharedBytes >= kTileRowsAtOnce * kMmaEdge * 4);
static_assert(kTileScaleBlock % kFloat8Depth == 0);

// fp32 by mma of tf32 (mma/float_kernel.cuh): blocks of edge x edge. Four stages of 128 fit into the 99 KiB of 8.6, 8.9
// and 12.x.
inline constexpr int kFloatDepth = 16;
inline constexpr int kFloatStages = 4;
inline constexpr int kFloatStretch = 32;  // of k that tensor cores sum before fp32 does
KP_SHARED_CODE constexpr int float_operand_bytes(int edge) {
  return edge * (kFloatDepth * 4 + 16);
}
KP_SHARED_CODE constexpr int float_shared_bytes(int edge) {
  return kFloatStages * 2 * float_operand_bytes(edge);
}
static_assert(float_operand_bytes(64) >= kFloatDepth * (64 * 4 + 32) && float_shared_bytes(128) <= 99 * 1024);
static_assert(float_shared_bytes(64) >= kTileRowsAtOnce * 64 * 4);

// fp64 (mma/double_kernel.cuh): blocks of 128 x 64.
inline constexpr int kDoubleRows = 128;
inline constexpr int kDoubleColumns = 64;
inline constexpr int kDoubleDepth = 16;
inline constexpr int kDoubleStages = 3;
inline constexpr int kDoublePitch = kDoubleDepth + 4;  // of a line of k, in elements
inline constexpr int kDoubleStageBytes = (kDoubleRows + kDoubleColumns) * kDoublePitch * 8;
inline constexpr int kDoubleSharedBytes = kDoubleStages * kDoubleStageBytes;
static_assert(kDoubleSharedBytes <= 99 * 1024 && kDoubleSharedBytes >= kTileRowsAtOnce * kDoubleColumns * 8);

enum class TileForm : uint8_t { kPlain, kGated, kGradient, kGatedGradient };  // as ops/matmul/matmul.h has them
// What becomes of an operand before it is multiplied: nothing, rounded to tf32, to bf16 or to two of them.
enum class TileRounding : uint8_t { kNone, kTf32, kBf16, kBf16Twice };
enum class TileType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2, kFloat64 };

struct TileOperand {
  const void* data;
  int64_t batch, outer, inner;  // strides: of m or n, and of k
  int64_t pair;                 // not 0: lines come in pairs, outer apart, and this is from the first to the second
};
struct TileMatrix {
  void* data;  // null: absent
  int64_t batch, row;
  TileType type;
};
// The scale of a row and of a block of k: data[row / rows_each * row + block * block]. Null: 1.
struct TileScale {
  const float* data;
  int64_t row, block;
  int32_t rows_each;
};

// Which lines of memory an operand's lines are: its rows, or with by_depth its steps of k. Null: as they lie.
struct TileGather {
  const int32_t* index = nullptr;
  bool by_depth = false;
};

struct TileArguments {
  TileOperand a, b;
  TileScale scale_a, scale_b;
  int32_t m, n, k;
  float alpha, beta;
  double wide_alpha, wide_beta;  // the same, for fp64
  TileForm form;
  pointwise::Kind kind;
  TileRounding rounding;
  TileMatrix bias;  // [n]
  TileMatrix saved, residual, output, preactivation;
  TileMatrix row_sums;        // [batch, m]
  const float* output_scale;  // null: 1
  float* amax;                // null: not wanted
  const int32_t* only_if;     // of fp32's mma: where this is 0, there is nothing to do. Null: always
};

// Products of groups of rows (ops/grouped_matmul). Group g has the rows [offsets[g - 1], offsets[g]) of a and of the
// output and b's matrix g; by_depth it has those rows of a and of b as its steps of k, and the output's matrix g.
struct GroupedTileArguments {
  TileArguments product;  // of all groups: m is their number of rows, or by_depth k
  const int32_t* offsets;
  const int32_t* gather_a;  // of all rows; null: as they lie
  const int32_t* gather_b;  // by_depth only
  int32_t groups;
  bool by_depth;
  int64_t bias_stride;  // from a group's bias to the next
};
inline constexpr int kMostTileGroups = 4 * kTileThreads;

}  // namespace kernel_pytorch::product
