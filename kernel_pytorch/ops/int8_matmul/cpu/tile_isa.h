// A block of int32 dot products along k: rows of x as codes + 128 (unsigned), rows of the weight signed. 128 times the
// weight's own sums is taken off at the end of a block of columns, lane by lane, where sums become floats and meet
// their scale. Exact: products of 16-bit numbers summed in pairs, or four bytes of VNNI and SDOT; none saturates.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/int8_matmul/cpu/integers.h"

namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::Vec;
using cpu::VecI;

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;  // as both operands take them
static constexpr int64_t kStepColumns = 64;
KP_PRIMITIVE Bytes load_x(const uint8_t* from) {
  return _mm512_loadu_si512(from);
}
KP_PRIMITIVE Bytes load_weight(const int8_t* from) {
  return _mm512_loadu_si512(from);
}
KP_PRIMITIVE VecI add_dots(VecI sum, Bytes x, Bytes weight) {
  return reinterpret_cast<VecI>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), x, weight));
}
KP_PRIMITIVE VecI add_weights(VecI sum, Bytes weight) {
  return add_dots(sum, _mm512_set1_epi8(1), weight);
}
#elif defined(__AVX512BW__)
typedef __m512i Bytes;
static constexpr int64_t kStepColumns = 32;
KP_PRIMITIVE Bytes load_x(const uint8_t* from) {
  return _mm512_maskz_cvtepu8_epi16(0xffffffffu, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
KP_PRIMITIVE Bytes load_weight(const int8_t* from) {
  return _mm512_maskz_cvtepi8_epi16(0xffffffffu, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
KP_PRIMITIVE VecI add_dots(VecI sum, Bytes x, Bytes weight) {
  return sum + reinterpret_cast<VecI>(_mm512_madd_epi16(x, weight));
}
KP_PRIMITIVE VecI add_weights(VecI sum, Bytes weight) {
  return add_dots(sum, _mm512_set1_epi16(1), weight);
}
#elif defined(__AVX2__)
typedef __m256i Bytes;
static constexpr int64_t kStepColumns = 16;
KP_PRIMITIVE Bytes load_x(const uint8_t* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
KP_PRIMITIVE Bytes load_weight(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
KP_PRIMITIVE VecI add_dots(VecI sum, Bytes x, Bytes weight) {
  return sum + reinterpret_cast<VecI>(_mm256_madd_epi16(x, weight));
}
KP_PRIMITIVE VecI add_weights(VecI sum, Bytes weight) {
  return add_dots(sum, _mm256_set1_epi16(1), weight);
}
#elif defined(__ARM_FEATURE_DOTPROD) && KP_LANES == 4
// Both operands are signed here, so there is nothing to take off: add_weights leaves zeros.
typedef int8x16_t Bytes;
static constexpr int64_t kStepColumns = 16;
KP_PRIMITIVE Bytes load_x(const uint8_t* from) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(0x80)));
}
KP_PRIMITIVE Bytes load_weight(const int8_t* from) {
  return vld1q_s8(from);
}
KP_PRIMITIVE VecI add_dots(VecI sum, Bytes x, Bytes weight) {
  return reinterpret_cast<VecI>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), x, weight));
}
KP_PRIMITIVE VecI add_weights(VecI sum, Bytes) {
  return sum;
}
#else
typedef int16_t Bytes __attribute__((vector_size(16)));
static constexpr int64_t kStepColumns = 8;
KP_PRIMITIVE Bytes load_x(const uint8_t* from) {
  Bytes made;
  for (int i = 0; i < 8; ++i) made[i] = from[i];
  return made;
}
KP_PRIMITIVE Bytes load_weight(const int8_t* from) {
  Bytes made;
  for (int i = 0; i < 8; ++i) made[i] = from[i];
  return made;
}
KP_PRIMITIVE VecI add_dots(VecI sum, Bytes x, Bytes weight) {
#if defined(__x86_64__)
  return sum + reinterpret_cast<VecI>(_mm_madd_epi16(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(weight)));
#elif defined(__aarch64__) && KP_LANES == 4
  const auto codes = reinterpret_cast<int16x8_t>(x), weights = reinterpret_cast<int16x8_t>(weight);
  const int32x4_t lower = vmlal_s16(reinterpret_cast<int32x4_t>(sum), vget_low_s16(codes), vget_low_s16(weights));
  return reinterpret_cast<VecI>(vmlal_high_s16(lower, codes, weights));
#else
  for (int i = 0; i < 4; ++i) sum[i] += x[2 * i] * weight[2 * i] + x[2 * i + 1] * weight[2 * i + 1];
  return sum;
#endif
}
KP_PRIMITIVE VecI add_weights(VecI sum, Bytes weight) {
  Bytes ones;
  for (int i = 0; i < 8; ++i) ones[i] = 1;
  return add_dots(sum, ones, weight);
}
#endif

// A step's columns, of which so many are there; others are zeros of the weight.
KP_PRIMITIVE Bytes load_weight_partial(const int8_t* from, int64_t count) {
#if defined(__AVX512VNNI__)
  return _mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, from);
#else
  alignas(64) int8_t padded[kStepColumns] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(count));
  return load_weight(padded);
#endif
}

template <int kRows, int kWeights>
KP_PRIMITIVE void multiply_tile(const IntegerBlock& block, int64_t row, int64_t column) {
  Vec totals[kRows][kWeights] = {};
  const uint8_t* x = block.x + row * block.x_stride;
  const int8_t* weight = block.weight + column * block.k;
  for (int64_t begin = 0, group = 0; begin < block.k; begin += block.block, ++group) {
    const int64_t end = begin + block.block < block.k ? begin + block.block : block.k;
    VecI sums[kRows][kWeights] = {}, own[kWeights] = {};
    const auto add = [&](int64_t first, auto load) {
      Bytes weights[kWeights];
#pragma GCC unroll 8
      for (int j = 0; j < kWeights; ++j) {
        weights[j] = load(weight + j * block.k + first);
        own[j] = add_weights(own[j], weights[j]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Bytes codes = load_x(x + i * block.x_stride + first);
#pragma GCC unroll 8
        for (int j = 0; j < kWeights; ++j) sums[i][j] = add_dots(sums[i][j], codes, weights[j]);
      }
    };
    int64_t first = begin;
    for (; first + kStepColumns <= end; first += kStepColumns) {
      add(first, [](const int8_t* from) { return load_weight(from); });
    }
    if (const int64_t left = end - first; left > 0) {
      add(first, [left](const int8_t* from) { return load_weight_partial(from, left); });
    }
#pragma GCC unroll 8
    for (int j = 0; j < kWeights; ++j) {
      const float scale = block.scales[(column + j) * block.groups + (block.groups == 1 ? 0 : group)];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        totals[i][j] += __builtin_convertvector(sums[i][j] - own[j] * 128, Vec) * scale;
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kWeights; ++j) {
      block.sums[(row + i) * block.sums_stride + column + j] = cpu::horizontal_sum(totals[i][j]);
    }
  }
}

template <int kRows>
void multiply_rows(const IntegerBlock& block, int64_t row) {
  int64_t column = 0;
  for (; column + 4 <= block.n; column += 4) multiply_tile<kRows, 4>(block, row, column);
  for (; column < block.n; ++column) multiply_tile<kRows, 1>(block, row, column);
}

void multiply_block(const IntegerBlock& block) {
  int64_t row = 0;
  for (; row + 4 <= block.m; row += 4) multiply_rows<4>(block, row);
  for (; row + 2 <= block.m; row += 2) multiply_rows<2>(block, row);
  for (; row < block.m; ++row) multiply_rows<1>(block, row);
}

}  // namespace
}  // namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE
