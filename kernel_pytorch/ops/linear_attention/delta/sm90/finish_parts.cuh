// What the gradients of a chunk are made with: operands read turned, and the stages of 64 values. sm_80.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/sm90/prepare.cuh"

namespace kernel_pytorch::linear_attention::delta {

// The operand whose rows (first: sums run along the tile's rows) or columns (second) are the tile's columns.
template <bool kIsSecond, int kPitch>
__device__ __forceinline__ void load_turned(uint32_t (&words)[4], uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int high_row = kIsSecond ? matrix % 2 : matrix / 2, high_column = kIsSecond ? matrix / 2 : matrix % 2;
  ptx::ldmatrix_x4_trans(words, tile + (row + 8 * high_row + lane % 8) * kPitch + (column + 8 * high_column) * 2);
}
template <class T>
__device__ __forceinline__ void multiply_pair(float (&low)[4], float (&high)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[4]) {
  tile::multiply_fragments<T>(low, a, b[0], b[1]);
  tile::multiply_fragments<T>(high, a, b[2], b[3]);
}

// Tiles of a stage of 64 values.
struct GradientStage {
  uint32_t grad_output, errors, grad_value, grad_writes, states, grad_states;
  __device__ __forceinline__ GradientStage(uint32_t at, int width)
      : grad_output(at),
        errors(at + kChunkTokens * kGradientPitch),
        grad_value(errors + kChunkTokens * kGradientPitch),
        grad_writes(grad_value + kChunkTokens * kGradientPitch),
        states(grad_writes + kChunkTokens * kGradientPitch),
        grad_states(states + width * kGradientPitch) {}
};

// Tile `tile` of the values, of `tiles`, into its stage of two.
template <class T, int kWidth>
__device__ __forceinline__ void load_stage(const GradientArguments& arguments, const ChunkPlace& place, int head,
                                           int tile, int tiles, uint32_t stages) {
  const GradientStage stage(stages + tile % 2 * gradient_stage_bytes(kWidth), kWidth);
  const auto tokens = [&](const ScanTensor& from, uint32_t to) {
    for (int i = threadIdx.x; i < kChunkTokens * 8; i += kGradientThreads) {
      const int row = i / 8, value = tile * kGroupValues + i % 8 * 8;
      const bool is_there = row < place.count && value < arguments.values;
      const T* source = row_of<T>(from, place.batch, place.first + (is_there ? row : 0), head) + (is_there ? value : 0);
      ptx::cp_async_cg_shared_global_16_fill(to + row * kGradientPitch + i % 8 * 16, source, is_there ? 16 : 0);
    }
  };
  const auto kept = [&](const void* from, int rows, uint32_t to) {
    const auto* source =
        static_cast<const ptx::Word4*>(from) + (static_cast<int64_t>(blockIdx.x) * tiles + tile) * rows * 8;
    for (int i = threadIdx.x; i < rows * 8; i += kGradientThreads) {
      ptx::cp_async_cg_shared_global_16(to + i / 8 * kGradientPitch + i % 8 * 16, source + i);
    }
  };
  tokens(arguments.grad_output, stage.grad_output);
  tokens(arguments.grad_value, stage.grad_value);
  kept(arguments.errors, kChunkTokens, stage.errors);
  kept(arguments.grad_writes, kChunkTokens, stage.grad_writes);
  kept(arguments.states, kWidth, stage.states);
  kept(arguments.grad_states, kWidth, stage.grad_states);
  ptx::cp_async_commit_group();
}

template <class T>
__device__ __forceinline__ void put_gradient(void* to, bool is_float, int64_t at, float value) {
  if (is_float) {
    static_cast<float*>(to)[at] = value;
  } else {
    static_cast<T*>(to)[at] = tile::from_float<T>(value);
  }
}

}  // namespace kernel_pytorch::linear_attention::delta
