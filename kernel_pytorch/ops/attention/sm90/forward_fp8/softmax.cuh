// Softmax of a block of scores whose probabilities become e4m3: its range is 2^-9 to 448, so the largest of a row is
// kept between 2^6 and 2^8.75. The reference is moved only where a block grows beyond that, which is rare after a row's
// first keys; what is then multiplied is the output and the sum. Probabilities below 2^-16 of the largest are lost; the
// sum, which is fp32, has them.
//
// `add` looks for the largest score first. `add_bounded` does not: where norms bound the scores, exponentials are
// finite, and whether one is too large for e4m3 shows in the sum, which is needed anyway.
#pragma once

#include "kernel_pytorch/ops/attention/sm90/forward/softmax.cuh"

namespace kernel_pytorch::attention::fp8 {

inline constexpr float kReference = 6.0f;  // log2 of what the largest score of the first block becomes
inline constexpr float kMost = 8.75f;      // log2 of what no probability may exceed; 448 is 2^8.807
inline constexpr float kLargestCode = 448.0f;
// Of scores in base 2: with a reference of another, the exponent is at most twice that, and sums stay finite.
inline constexpr float kBound = 55.0f;

// 2^x by a polynomial of degree 3, right to 2^-10: what it becomes has 4 bits. Powers below -126 are that.
__device__ __forceinline__ float power_of_two(float x) {
  x = fmaxf(x, -126.0f);
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23: the nearest integer is in the low bits
  const float rest = x - (shifted - 12582912.0f);
  const float power = fmaf(fmaf(fmaf(0.05550357f, rest, 0.24022651f), rest, 0.69314718f), rest, 1.0f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(shifted) << 23));
}

// Two rows' reference and the thread's part of their sums.
template <int kPolynomial>
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
    float most[2] = {tile::minus_infinity(), tile::minus_infinity()};
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], scores[i]);
    const bool has_grown =
        __any_sync(0xffffffffu, fmaf(most[0], scale, shift[0]) > kMost || fmaf(most[1], scale, shift[1]) > kMost);
    if (has_grown) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float top = quad_max(most[row]) * scale;
        const bool moves = top + shift[row] > kMost;  // not for -inf and +inf: a row that has seen nothing yet
        const float lower = moves ? kReference - top : shift[row];
        factors[row] = moves ? ptx::ex2_approx_ftz_f32(lower - shift[row]) : 1.0f;
        shift[row] = lower;
        sum[row] *= factors[row];
      }
    }
    float base[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) base[row] = shift[row] == plus_infinity() ? 0.0f : shift[row];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float exponent = fmaf(scores[i], scale, base[i / 2 % 2]);
      scores[i] = i / 4 % 8 < kPolynomial ? power_of_two(exponent) : ptx::ex2_approx_ftz_f32(exponent);
      sum[i / 2 % 2] += scores[i];
    }
    return has_grown;
  }

  // The same of scores within kBound, of rows that have seen a key.
  template <int kCount>
  __device__ __forceinline__ bool add_bounded(float (&scores)[kCount], float scale, float (&factors)[2]) {
    float block[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float exponent = fmaf(scores[i], scale, shift[i / 2 % 2]);
      scores[i] = i / 4 % 8 < kPolynomial ? power_of_two(exponent) : ptx::ex2_approx_ftz_f32(exponent);
      block[i / 2 % 2] += scores[i];
    }
    bool has_grown = __any_sync(0xffffffffu, fmaxf(block[0], block[1]) > kLargestCode);
    if (has_grown) has_grown = shrink(scores, block, factors);
    sum[0] += block[0];
    sum[1] += block[1];
    return has_grown;
  }

 private:
  // Moves the reference of rows with a probability beyond e4m3, by a power of two.
  template <int kCount>
  __device__ __forceinline__ bool shrink(float (&probabilities)[kCount], float (&block)[2], float (&factors)[2]) {
    float most[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], probabilities[i]);
    if (!__any_sync(0xffffffffu, fmaxf(most[0], most[1]) > kLargestCode)) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float top = quad_max(most[row]);
      const int exponent = top > kLargestCode ? (__float_as_int(top) >> 23) - 127 - static_cast<int>(kReference) : 0;
      factors[row] = __int_as_float((127 - exponent) << 23);
      shift[row] -= static_cast<float>(exponent);
      sum[row] *= factors[row];
      block[row] *= factors[row];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) probabilities[i] *= factors[i / 2 % 2];
    return true;
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
