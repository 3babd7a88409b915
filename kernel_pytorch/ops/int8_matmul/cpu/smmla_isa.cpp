// kp-isa: neonbf16
// Products of 8-bit integers by Arm's matrix instruction SMMLA, which adds a 2 x 8 times an 8 x 2 matrix to 2 x 2 sums:
// 8 x 8 sums are 16 of the 32 registers. Rows of x and of the weight are taken in pairs as they lie, interleaved by 8
// columns in registers; a pair without a second row takes the first one twice.
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/int8_matmul/cpu/integers.h"

namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE {
namespace {

constexpr int64_t kStep = 16;  // columns of two instructions

struct Pair {
  int8x16_t first, second;  // 8 columns of both rows, then the next 8
};
KP_PRIMITIVE Pair interleave(int8x16_t upper, int8x16_t lower) {
  const int64x2_t a = vreinterpretq_s64_s8(upper), b = vreinterpretq_s64_s8(lower);
  return {vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))};
}

KP_PRIMITIVE int8x16_t load_x(const uint8_t* from) {  // codes + 128, padded behind k
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(0x80)));
}
KP_PRIMITIVE int8x16_t load_weight(const int8_t* from, int64_t count) {
  if (count >= kStep) return vld1q_s8(from);
  int8_t padded[kStep] = {};
  __builtin_memcpy(padded, from, static_cast<size_t>(count));
  return vld1q_s8(padded);
}

template <int kRowPairs, int kColumnPairs>
void multiply_tile(const IntegerBlock& block, int64_t row, int64_t column) {
  const uint8_t* x[2 * kRowPairs];
  const int8_t* weight[2 * kColumnPairs];
  const float* scales[2 * kColumnPairs];
  for (int i = 0; i < 2 * kRowPairs; ++i) {
    x[i] = block.x + (row + i < block.m ? row + i : block.m - 1) * block.x_stride;
  }
  for (int j = 0; j < 2 * kColumnPairs; ++j) {
    const int64_t here = column + j < block.n ? column + j : block.n - 1;
    weight[j] = block.weight + here * block.k;
    scales[j] = block.scales + here * block.groups;
  }
  float32x4_t totals[kRowPairs][kColumnPairs] = {};
  for (int64_t begin = 0, group = 0; begin < block.k; begin += block.block, ++group) {
    const int64_t end = begin + block.block < block.k ? begin + block.block : block.k;
    int32x4_t sums[kRowPairs][kColumnPairs] = {};
    for (int64_t first = begin; first < end; first += kStep) {
      Pair rows[kRowPairs];
#pragma GCC unroll 4
      for (int i = 0; i < kRowPairs; ++i) rows[i] = interleave(load_x(x[2 * i] + first), load_x(x[2 * i + 1] + first));
#pragma GCC unroll 4
      for (int j = 0; j < kColumnPairs; ++j) {
        const Pair columns = interleave(load_weight(weight[2 * j] + first, end - first),
                                        load_weight(weight[2 * j + 1] + first, end - first));
#pragma GCC unroll 4
        for (int i = 0; i < kRowPairs; ++i) sums[i][j] = vmmlaq_s32(sums[i][j], rows[i].first, columns.first);
#pragma GCC unroll 4
        for (int i = 0; i < kRowPairs; ++i) sums[i][j] = vmmlaq_s32(sums[i][j], rows[i].second, columns.second);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kColumnPairs; ++j) {
      const int64_t place = block.groups == 1 ? 0 : group;
      const float left = scales[2 * j][place], right = scales[2 * j + 1][place];
      const float32x4_t scale = {left, right, left, right};
#pragma GCC unroll 4
      for (int i = 0; i < kRowPairs; ++i) totals[i][j] += vcvtq_f32_s32(sums[i][j]) * scale;
    }
  }
  for (int i = 0; i < 2 * kRowPairs && row + i < block.m; ++i) {
    for (int j = 0; j < 2 * kColumnPairs && column + j < block.n; ++j) {
      block.sums[(row + i) * block.sums_stride + column + j] = totals[i / 2][j / 2][i % 2 * 2 + j % 2];
    }
  }
}

template <int kRowPairs>
void multiply_rows(const IntegerBlock& block, int64_t row) {
  int64_t column = 0;
  for (; column + 8 <= block.n; column += 8) multiply_tile<kRowPairs, 4>(block, row, column);
  for (; column < block.n; column += 2) multiply_tile<kRowPairs, 1>(block, row, column);
}

}  // namespace

void multiply_dots(const IntegerBlock& block) {
  int64_t row = 0;
  for (; row + 8 <= block.m; row += 8) multiply_rows<4>(block, row);
  for (; row + 4 <= block.m; row += 4) multiply_rows<2>(block, row);
  for (; row < block.m; row += 2) multiply_rows<1>(block, row);
}

}  // namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE
