// Softmax of a block of scores whose probabilities become e4m3: its range is 2^-9 to 448, so the largest of a row is
// kept between 2^6 and 2^8.75. The reference is moved only where a block grows beyond that, which is rare after a row's
// first keys; what is then multiplied is the output and the sum. Probabilities below 2^-16 of the largest are lost; the
// sum, which is fp32, has them.
#pragma once

#include "kernel_pytorch/ops/attention/sm90/forward/softmax.cuh"

namespace kernel_pytorch::attention::fp8 {

inline constexpr float kReference = 6.0f;  // log2 of what the largest score of the first block becomes
inline constexpr float kMost = 8.75f;      // log2 of what no probability may exceed; 448 is 2^8.807

// Two rows' reference and the thread's part of their sums.
struct Rows {
  float shift[2];  // added in the exponent; +inf: nothing seen yet
  float sum[2];

  __device__ __forceinline__ void begin() {
    shift[0] = shift[1] = plus_infinity();
    sum[0] = sum[1] = 0;
  }

  // Scores (times `scale`, positive, in base 2) become probabilities. True, for all lanes of the warp alike, where the
  // output so far must be multiplied by `factors`.
  template <int kCount>
  __device__ __forceinline__ bool add(float (&scores)[kCount], float scale, float (&factors)[2]) {
    // Two of each, since one would wait for itself.
    float most[2][2] = {{tile::minus_infinity(), tile::minus_infinity()},
                        {tile::minus_infinity(), tile::minus_infinity()}};
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2][i % 2] = fmaxf(most[i / 2 % 2][i % 2], scores[i]);
    const float top[2] = {fmaxf(most[0][0], most[0][1]), fmaxf(most[1][0], most[1][1])};
    const bool has_grown =
        __any_sync(0xffffffffu, fmaf(top[0], scale, shift[0]) > kMost || fmaf(top[1], scale, shift[1]) > kMost);
    if (has_grown) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float largest = quad_max(top[row]) * scale;
        const bool moves = largest + shift[row] > kMost;  // not for -inf and +inf: a row that has seen nothing yet
        const float lower = moves ? kReference - largest : shift[row];
        factors[row] = moves ? ptx::ex2_approx_ftz_f32(lower - shift[row]) : 1.0f;
        shift[row] = lower;
        sum[row] *= factors[row];
      }
    }
    float base[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) base[row] = shift[row] == plus_infinity() ? 0.0f : shift[row];
    float block[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, base[i / 2 % 2]));
      block[i / 2 % 2][i % 2] += scores[i];
    }
    sum[0] += block[0][0] + block[0][1];
    sum[1] += block[1][0] + block[1][1];
    return has_grown;
  }
};

// Accumulators of scores as operands of the next product: four bytes are two neighbouring columns of two blocks of
// eight. The values' keys are in that order (key_at_position).
template <int kCount>
__device__ __forceinline__ void pack_probabilities(uint32_t (&words)[kCount / 4], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float* pair = values + i / 2 * 8 + i % 2 * 2;
    const float four[4] = {pair[0], pair[1], pair[4], pair[5]};
    words[i] = tile::Word<tile::Float8E4M3>::pack(four);
  }
}

}  // namespace kernel_pytorch::attention::fp8
