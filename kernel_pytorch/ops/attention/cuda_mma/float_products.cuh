// Products of fp32 on mma.m16n8k8 of tf32, which reads 11 bits of each operand's 24. An operand is split while it is
// loaded into big + small, and small * big + big * small + big * big is right to fp32's rounding: what is left out is
// 2^-22 of a product, of either sign. kTf32: big * big alone.
//
// Split in registers, not in shared memory: there both parts would double the bytes that a product reads, 16 for each
// 3 instructions and column, which is more than shared memory delivers; in registers it is three operations an element.
//
// Tensor cores cut a sum off instead of rounding it, so that a long sum drifts towards zero. Sums of kStretch terms are
// kept by themselves, big * big apart from the rest, and added to the accumulators by rounded additions.
#pragma once

#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/mma.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/tile_cuda.h"

namespace kernel_pytorch::attention {

template <class Element>
inline constexpr bool kIsFloat = sizeof(Element) == 4;

inline constexpr int kStretch = 32;

// Words of an operand. The first one's big is rounded to nearest, so that small has either sign and small * small,
// which is left out, sums up to nothing; of the second one, which each warp splits anew, big is what the instruction
// reads of the word itself.
template <bool kTf32, int kCount>
struct FloatOperand {
  uint32_t big[kCount], small[kTf32 ? 1 : kCount];

  __device__ __forceinline__ void round(int i, float value) {
    big[i] = __float_as_uint(value) + 0x1000u;
    if constexpr (!kTf32) small[i] = __float_as_uint(value - __uint_as_float(big[i] & 0xffffe000u));
  }
  __device__ __forceinline__ void cut(int i, float value) {
    if constexpr (kTf32) return round(i, value);
    big[i] = __float_as_uint(value);
    small[i] = __float_as_uint(value - __uint_as_float(big[i] & 0xffffe000u));
  }
};

// A product of kBlocks * 16 rows and kGroups * 8 columns.
template <bool kTf32, int kBlocks, int kGroups>
class FloatSums {
 public:
  // Eight terms more; the second operand has two words for each group.
  __device__ __forceinline__ void add(const FloatOperand<kTf32, 4> (&left)[kBlocks],
                                      const FloatOperand<kTf32, 2 * kGroups>& right) {
    if constexpr (!kTf32) multiply(small_, left, &FloatOperand<kTf32, 4>::small, right.big);
    multiply(big_, left, &FloatOperand<kTf32, 4>::big, right.big);
    if constexpr (!kTf32) multiply(small_, left, &FloatOperand<kTf32, 4>::big, right.small);
  }

  // To the accumulators' groups from `first` on.
  template <class Sums>
  __device__ __forceinline__ void add_to(Sums (&sums)[kBlocks], int first) const {
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        const float sum = kTf32 ? big_[r][i / 4][i % 4] : big_[r][i / 4][i % 4] + small_[r][i / 4][i % 4];
        sums[r].values[4 * first + i] += sum;
      }
    }
  }

 private:
  __device__ __forceinline__ static void multiply(float (&sums)[kBlocks][kGroups][4],
                                                  const FloatOperand<kTf32, 4> (&left)[kBlocks],
                                                  uint32_t (FloatOperand<kTf32, 4>::*part)[4],
                                                  const uint32_t (&right)[2 * kGroups]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        ptx::mma_m16n8k8_f32_tf32(sums[r][group], left[r].*part, right[2 * group], right[2 * group + 1]);
      }
    }
  }

  float big_[kBlocks][kGroups][4] = {}, small_[kTf32 ? 1 : kBlocks][kTf32 ? 1 : kGroups][4] = {};
};

// sums[r] += A[r] B^T over kDepth columns, as multiply_by_transpose (attention/cuda_mma/products.cuh). Four floats are
// a row of ldmatrix.
template <class Element, bool kTf32, int kBlocks, int kColumns, int kDepth, class Sums>
requires(kIsFloat<Element>) __device__ __forceinline__
    void multiply_by_transpose(Sums (&sums)[kBlocks], uint32_t a, uint32_t b) {
  static_assert(kDepth % kStretch == 0);
  constexpr int pitch = pitch_bytes(kDepth, sizeof(Element));
  constexpr int kWidth = kColumns < 32 ? kColumns : 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t a_lane = a + lane % 16 * pitch + lane / 16 * 16;
  const uint32_t b_lane = b + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int first = 0; first < kColumns; first += kWidth) {
#pragma unroll(kBlocks == 1 && kDepth <= 64 ? kDepth / kStretch : 1)
    for (int stretch = 0; stretch < kDepth; stretch += kStretch) {
      FloatSums<kTf32, kBlocks, kWidth / 8> part;
#pragma unroll
      for (int depth = 0; depth < kStretch; depth += 8) {
        FloatOperand<kTf32, 4> left[kBlocks];
        FloatOperand<kTf32, kWidth / 4> right;
        uint32_t words[4];
#pragma unroll
        for (int r = 0; r < kBlocks; ++r) {
          ptx::ldmatrix_x4(words, a_lane + r * 16 * pitch + (stretch + depth) * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) left[r].round(i, __uint_as_float(words[i]));
        }
#pragma unroll
        for (int column = 0; column < kWidth; column += 16) {
          ptx::ldmatrix_x4(words, b_lane + (first + column) * pitch + (stretch + depth) * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) right.cut(column / 4 + i, __uint_as_float(words[i]));
        }
        part.add(left, right);
      }
      part.add_to(sums, first / 8);
    }
  }
}

// sums[r] += A[r] B, as multiply_fragments. A thread's accumulators are at columns 2t and 2t + 1, where the operand has
// t and t + 4: both operands count each eight rows of B as 0, 2, 4, 6, 1, 3, 5, 7.
template <class Element, bool kTf32, int kBlocks, int kColumns, int kDepth, class Sums, class Fragments>
requires(kIsFloat<Element>) __device__ __forceinline__
    void multiply_fragments(Sums (&sums)[kBlocks], const Fragments (&a)[kBlocks], uint32_t b,
                            int pitch = pitch_bytes(kColumns, sizeof(Element))) {
  constexpr int kWidth = kBlocks == 1 && kColumns <= 192 ? 32 : 16, kSteps = kDepth / 8;
  static_assert(kColumns % kWidth == 0);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t b_lane = b + lane % 4 * 2 * pitch + lane / 4 * 4;
  FloatOperand<kTf32, 4> left[kSteps][kBlocks];
#pragma unroll
  for (int i = 0; i < kSteps * kBlocks; ++i) {
    const float* values = a[i % kBlocks].values + i / kBlocks * 4;
    FloatOperand<kTf32, 4>& operand = left[i / kBlocks][i % kBlocks];
    operand.round(0, values[0]);
    operand.round(1, values[2]);
    operand.round(2, values[1]);
    operand.round(3, values[3]);
  }
#pragma unroll
  for (int column = 0; column < kColumns; column += kWidth) {
#pragma unroll
    for (int stretch = 0; stretch < kSteps; stretch += kStretch / 8) {
      FloatSums<kTf32, kBlocks, kWidth / 8> part;
#pragma unroll
      for (int step = stretch; step < kSteps && step < stretch + kStretch / 8; ++step) {
        FloatOperand<kTf32, kWidth / 4> right;
#pragma unroll
        for (int group = 0; group < kWidth / 8; ++group) {
          const uint32_t address = b_lane + step * 8 * pitch + column * 4 + group * 32;
          right.cut(2 * group, ptx::ld_shared_f32(address));
          right.cut(2 * group + 1, ptx::ld_shared_f32(address + pitch));
        }
        part.add(left[step], right);
      }
      part.add_to(sums, column / 8);
    }
  }
}

}  // namespace kernel_pytorch::attention
