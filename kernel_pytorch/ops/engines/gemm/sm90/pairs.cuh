// Sums whose output is a pair, the gradients of a gate and its up, at the place of the forward's pair in `saved`. A
// lane's two neighbouring sums belong to eight bytes of 16-bit pairs, which it can read and write itself, so that no
// value changes lanes. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/auxiliary.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"

namespace kernel_pytorch::product {

// A lane's pairs of a box of two rows by 16 * kGroups columns, a vector for each 16: two pairs of its first row, then
// of its second. Zeros beyond the matrix, whose columns are whole vectors of 16 bytes. Nothing waits for them here.
template <class T, int kGroups>
__device__ __forceinline__ void fetch_pairs(const Sm90Auxiliary& auxiliary, const AuxiliaryPlace& place,
                                            ptx::Word4* pairs) {
  const T* data = static_cast<const T*>(auxiliary.data) + place.batch * auxiliary.batch_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = place.row + place.lane / 4 + 8 * half;
    const T* of_row = data + row * auxiliary.row_stride;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int32_t column = place.column + 16 * group + 4 * (place.lane % 4);
      float first, second;  // their bits are pairs
      ptx::ld_global_v2_f32_if(row < place.rows && column < place.columns, first, second,
                               reinterpret_cast<const float*>(of_row + column));
      (half == 0 ? pairs[group].x : pairs[group].z) = __float_as_uint(first);
      (half == 0 ? pairs[group].y : pairs[group].w) = __float_as_uint(second);
    }
  }
}

// Both gradients of a pair, where `value` is that of the gated product.
template <pointwise::Kind kKind, bool kAccurate>
__device__ __forceinline__ void pair_gradients(float value, float gate, float up, float* gradients) {
  const pointwise::Values at = pointwise::differentiate<kKind, kAccurate>(gate);
  gradients[0] = value * up * at.derivative;
  gradients[1] = value * at.value;
}

// For any types: `spread` holds the pairs in the order of wgmma's accumulators and takes their gradients. A value goes
// to the lane that has its pair.
template <pointwise::Kind kKind, bool kAccurate, int kSums>
__device__ __forceinline__ void spread_pairs(int32_t lane, const float (&values)[kSums], float (&spread)[2 * kSums]) {
  const int low = (lane & ~3) + lane % 4 / 2;
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {  // eight sums of a row
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even = __shfl_sync(0xffffffffu, values[i], low + 2 * half);
      const float odd = __shfl_sync(0xffffffffu, values[i + 1], low + 2 * half);
      float* pair = spread + i / 4 * 8 + half * 4 + i % 4;
      pair_gradients<kKind, kAccurate>(lane % 2 == 0 ? even : odd, pair[0], pair[1], pair);
    }
  }
}

// Packed pairs of 16 bits: words of the output in the order of `pairs`, of values as wgmma leaves sums.
template <pointwise::Kind kKind, class T, class Out, int kGroups>
__device__ __forceinline__ void spread_in_place(const float* values, const ptx::Word4* pairs,
                                                uint32_t (&words)[4 * kGroups]) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) {
    const ptx::Word4& four = pairs[i / 4];
    float pair[2], gradients[2];
    tile::Word<T>::unpack(i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w, pair);
    pair_gradients<kKind, false>(values[i], pair[0], pair[1], gradients);
    words[i] = tile::Word<Out>::pack(gradients);
  }
}

}  // namespace kernel_pytorch::product
