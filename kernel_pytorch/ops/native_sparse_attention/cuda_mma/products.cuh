// Products of 16 rows of a warp by mma.m16n8k16: operands in shared memory with rows of row_pitch, sums in registers.
// sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/arguments_mma_cuda.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;

// Accumulators of 16 rows and kColumns columns, by groups of 8 columns (tile/fragment.cuh).
template <int kColumns>
struct Sums {
  float values[kColumns == 0 ? 1 : kColumns / 2];
  __device__ __forceinline__ float (&group(int i))[4] { return *reinterpret_cast<float(*)[4]>(values + 4 * i); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
};

// sums = A B^T over kSize columns: A has this warp's kBlocks times 16 rows, B kColumns rows.
template <class Element, int kColumns, int kSize, int kBlocks>
__device__ __forceinline__ void multiply_rows(Sums<kColumns> (&sums)[kBlocks], uint32_t a, uint32_t b) {
  constexpr int kPitch = row_pitch(kSize);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t a_lane = a + lane % 16 * kPitch + lane / 16 * 16;
  const uint32_t b_lane = b + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (auto& block : sums) block.clear();
#pragma unroll
  for (int depth = 0; depth < kSize; depth += 16) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::ldmatrix_x4(left[r], a_lane + r * 16 * kPitch + depth * 2);
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      uint32_t right[4];
      ptx::ldmatrix_x4(right, b_lane + column * kPitch + depth * 2);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        tile::multiply_fragments<Element>(sums[r].group(column / 8), left[r], right[0], right[1]);
        tile::multiply_fragments<Element>(sums[r].group(column / 8 + 1), left[r], right[2], right[3]);
      }
    }
  }
}
template <class Element, int kColumns, int kSize>
__device__ __forceinline__ void multiply_rows(Sums<kColumns>& sums, uint32_t a, uint32_t b) {
  multiply_rows<Element, kColumns, kSize, 1>(reinterpret_cast<Sums<kColumns>(&)[1]>(sums), a, b);
}

// sums += A B: A is what another product's sums hold, rounded to Element; B has kDepth rows of kSize columns.
template <class Element, int kSize, int kDepth, int kBlocks>
__device__ __forceinline__ void add_products(Sums<kSize> (&sums)[kBlocks], const Sums<kDepth> (&a)[kBlocks],
                                             uint32_t b) {
  constexpr int kPitch = row_pitch(kSize);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t b_lane = b + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[r][i] = tile::Word<Element>::pack(a[r].values + depth / 2 + 2 * i);
    }
#pragma unroll
    for (int column = 0; column < kSize; column += 16) {
      uint32_t right[4];
      ptx::ldmatrix_x4_trans(right, b_lane + depth * kPitch + column * 2);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        tile::multiply_fragments<Element>(sums[r].group(column / 8), left[r], right[0], right[1]);
        tile::multiply_fragments<Element>(sums[r].group(column / 8 + 1), left[r], right[2], right[3]);
      }
    }
  }
}
template <class Element, int kSize, int kDepth>
__device__ __forceinline__ void add_products(Sums<kSize>& sums, const Sums<kDepth>& a, uint32_t b) {
  add_products<Element, kSize, kDepth, 1>(reinterpret_cast<Sums<kSize>(&)[1]>(sums),
                                          reinterpret_cast<const Sums<kDepth>(&)[1]>(a), b);
}

// Columns [0, columns) of a row of 16-bit elements, 16 bytes from this thread; zeros behind them, or where there is no
// row. `unit` counts eight columns.
template <class Element>
__device__ __forceinline__ void copy_unit(uint32_t target, const Element* row, int unit, int32_t columns,
                                          const void* anything) {
  const bool is_there = row != nullptr && unit * 8 < columns;
  ptx::cp_async_cg_shared_global_16_fill(target + unit * 16, is_there ? row + unit * 8 : anything, is_there ? 16 : 0);
}

// Rows `first` up to `first` + `rows` of a head into a tile of kRows, the others as zeros.
template <class Element, int kRows, int kSize>
__device__ __forceinline__ void copy_rows(uint32_t target, const Rows& from, int32_t batch, int32_t head, int32_t first,
                                          int32_t rows, int32_t columns) {
  constexpr int kUnits = kSize / 8;
  const Element* base = static_cast<const Element*>(from.data) + batch * from.batch + head * from.head;
#pragma unroll 1
  for (int i = 0; i < kRows * kUnits / kMmaThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kMmaThreads, row = index / kUnits, unit = index % kUnits;
    copy_unit<Element>(target + row * row_pitch(kSize), row < rows ? base + (first + row) * from.token : nullptr, unit,
                       columns, from.data);
  }
}

// The softmax of the two rows that a thread shares with three others, step by step, in base 2 after a positive scale.
class RunningSoftmax {
 public:
  // Scores become exponentials; -inf is no score. `times`: the logarithm to base 2 of how often each row counts them.
  template <int kCount>
  __device__ __forceinline__ void add(float (&scores)[kCount], float scale, const float* times, float (&rescale)[2]) {
    float center[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = tile::minus_infinity();
#pragma unroll
      for (int i = 2 * row; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
      largest = fmaxf(largest_[row], tile::max_lanes<4>(largest));
      const float base = largest == tile::minus_infinity() ? 0.0f : largest;
      center[row] = base * scale - times[row];
      rescale[row] = ptx::ex2_approx_ftz_f32((largest_[row] - base) * scale);
      largest_[row] = largest;
      sum_[row] *= rescale[row];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(scores[i] * scale - center[i / 2 % 2]);
      sum_[i / 2 % 2] += scores[i];
    }
  }
  // The logarithm to base 2 of each row's sum, and what turns its weighted values into means: 0 where it saw none.
  __device__ __forceinline__ void finish(float scale, float (&logarithm)[2], float (&factor)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = sum_[row] + __shfl_xor_sync(0xffffffffu, sum_[row], 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const bool is_empty = largest_[row] == tile::minus_infinity();
      factor[row] = is_empty ? 0.0f : 1.0f / sum;
      logarithm[row] = is_empty ? tile::minus_infinity() : largest_[row] * scale + ptx::lg2_approx_ftz_f32(sum);
    }
  }

 private:
  float largest_[2] = {tile::minus_infinity(), tile::minus_infinity()};
  float sum_[2] = {};
};

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&values)[kCount], const float (&factors)[2]) {
  if (!__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= factors[i / 2 % 2];
}

}  // namespace kernel_pytorch::native_sparse_attention
