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

enum class TileForm : uint8_t { kPlain, kGated, kGradient, kGatedGradient };  // as ops/matmul/matmul.h has them
// What becomes of an operand before it is multiplied: nothing, 13 bits dropped, rounded to bf16 or to two of them.
enum class TileRounding : uint8_t { kNone, kTf32, kBf16, kBf16Twice };
enum class TileType : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2 };

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

struct TileArguments {
  TileOperand a, b;
  TileScale scale_a, scale_b;
  int32_t m, n, k;
  float alpha, beta;
  TileForm form;
  pointwise::Kind kind;
  TileRounding rounding;
  TileMatrix bias;  // [n]
  TileMatrix saved, residual, output, preactivation;
  TileMatrix row_sums;        // [batch, m]
  const float* output_scale;  // null: 1
  float* amax;                // null: not wanted
};

}  // namespace kernel_pytorch::product
