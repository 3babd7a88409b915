// kp-isa: v4bf16
// Few rows of x in bf16 times rows of a weight in few bits, by dot products of pairs. 64 codes of 4 bits are 32 bytes,
// widened to 16 bits: their low halves name the even columns, their high halves the odd ones. A table holds all codes'
// values times the scale, as bf16, for each group of the step, and a lane's group is part of its index: one permutation
// decodes 32 weights with their scales. Tables cost a product and half a conversion for each group.
#include "kernel_pytorch/cpu/bfloat16_pairs.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/dots.h"

#if defined(__AVX512F__)

namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::Vec;
using cpu::Vec4;
using cpu::Vec8;
using cpu::VecI;
using cpu::VecU;
using cpu::VecU8;

KP_PRIMITIVE __m512i integers(VecU v) {
  return reinterpret_cast<__m512i>(v);
}
KP_PRIMITIVE VecU words(__m512i v) {
  return reinterpret_cast<VecU>(v);
}

// The group of a column: no division.
template <Format kFormat>
KP_PRIMITIVE int64_t group_at(const DotPart& part, int64_t column) {
  return is_integer(kFormat) ? column >> part.group_shift : column / (kFormat == Format::kNvfp4 ? 16 : 32);
}

template <Format kFormat>
KP_PRIMITIVE float scale_at(const DotPart& part, int64_t row, int64_t group) {
  const int64_t place = row * part.groups + (group < part.groups ? group : part.groups - 1);
  if constexpr (is_integer(kFormat)) {
    return from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(part.scales)[place]) << 16);
  } else {
    return part.byte_scale[static_cast<const uint8_t*>(part.scales)[place]];
  }
}
template <Format kFormat>
KP_PRIMITIVE int32_t zero_at(const DotPart& part, int64_t row, int64_t group) {
  if (!is_integer(kFormat) || part.zeros == nullptr) return middle_code(kFormat);
  return part.zeros[row * part.groups + (group < part.groups ? group : part.groups - 1)];
}

// The values of the 16 codes; of integers before the zero is taken off.
template <Format kFormat>
KP_PRIMITIVE Vec code_values() {
  Vec values;
  for (int i = 0; i < 16; ++i) {
    values[i] = is_integer(kFormat) ? static_cast<float>(i) : e2m1_value(static_cast<uint32_t>(i));
  }
  return values;
}
template <Format kFormat>
KP_PRIMITIVE Vec scaled_values(const DotPart& part, int64_t row, int64_t group, Vec values) {
  if constexpr (is_integer(kFormat)) values -= cpu::broadcast(static_cast<float>(zero_at<kFormat>(part, row, group)));
  return values * cpu::broadcast(scale_at<kFormat>(part, row, group));
}

// Tables of one row of the weight: two groups in each. Groups of 64 columns and more have one in both halves.
template <Format kFormat>
struct Tables {
  VecU first, second;  // second: of nvfp4, whose steps have four groups
};
template <Format kFormat>
KP_PRIMITIVE Tables<kFormat> tables_of(const DotPart& part, int64_t row, int64_t first_column, Vec values) {
  const int64_t group = group_at<kFormat>(part, first_column);
  const Vec low = scaled_values<kFormat>(part, row, group, values);
  if (part.group >= kDotStep) return {cpu::to_bfloat16(low, low), VecU{}};
  const Vec high = scaled_values<kFormat>(part, row, group + 1, values);
  if constexpr (kFormat != Format::kNvfp4) return {cpu::to_bfloat16(low, high), VecU{}};
  return {cpu::to_bfloat16(low, high), cpu::to_bfloat16(scaled_values<kFormat>(part, row, group + 2, values),
                                                        scaled_values<kFormat>(part, row, group + 3, values))};
}

// Which group of a step a 16-bit lane is of, above the four bits of a code.
template <Format kFormat>
KP_PRIMITIVE __m512i lane_groups() {
  constexpr int kLanesOfGroup = kFormat == Format::kNvfp4 ? 8 : 16;
  alignas(64) uint16_t groups[32];
  for (int i = 0; i < 32; ++i) groups[i] = static_cast<uint16_t>(i / kLanesOfGroup * 16);
  return _mm512_load_si512(groups);
}

// 64 codes as two vectors of 32 weights: the even columns and the odd ones.
template <Format kFormat>
KP_PRIMITIVE void decode(const Tables<kFormat>& tables, const uint8_t* bytes, int64_t available, __m512i groups,
                         VecU (&weights)[2]) {
  const __m256i loaded = available >= 32
                             ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes))
                             : _mm256_maskz_loadu_epi8((1u << available) - 1, reinterpret_cast<const __m256i*>(bytes));
  const __m512i pairs = _mm512_cvtepu8_epi16(loaded), four_bits = _mm512_set1_epi16(15);
  // (code & 15) | group
  const __m512i even = _mm512_ternarylogic_epi32(pairs, four_bits, groups, 0xea);
  const __m512i odd = _mm512_or_si512(_mm512_srli_epi16(pairs, 4), groups);
  if constexpr (kFormat == Format::kNvfp4) {
    weights[0] = words(_mm512_permutex2var_epi16(integers(tables.first), even, integers(tables.second)));
    weights[1] = words(_mm512_permutex2var_epi16(integers(tables.first), odd, integers(tables.second)));
  } else {
    weights[0] = words(_mm512_permutexvar_epi16(even, integers(tables.first)));
    weights[1] = words(_mm512_permutexvar_epi16(odd, integers(tables.first)));
  }
}

// 32 codes of 8 bits as weights.
template <Format kFormat>
KP_PRIMITIVE VecU decode_bytes(const DotPart& part, int64_t row, int64_t column, const uint8_t* bytes,
                               int64_t available) {
  const int64_t group = group_at<kFormat>(part, column);
  const Vec scale = cpu::broadcast(scale_at<kFormat>(part, row, group));
  const VecI zero = cpu::broadcast(zero_at<kFormat>(part, row, group));
  Vec halves[2];
  for (int half = 0; half < 2; ++half) {
    const int64_t left = available - 16 * half;
    const uint32_t mask = left >= 16 ? 0xffffu : left <= 0 ? 0u : (1u << left) - 1;
    const __m128i stored = _mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), bytes + 16 * half);
    const VecU codes = cpu::widen_bits(reinterpret_cast<VecU8>(stored));
    halves[half] = __builtin_convertvector(reinterpret_cast<VecI>(codes) - zero, Vec) * scale;
  }
  return cpu::to_bfloat16(halves[0], halves[1]);
}

// The sums of four vectors' lanes.
KP_PRIMITIVE Vec4 sums_of_four(Vec a, Vec b, Vec c, Vec d) {
#define KP_LOWER(x, y) __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define KP_UPPER(x, y) __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
  const Vec ab = KP_LOWER(a, b) + KP_UPPER(a, b), cd = KP_LOWER(c, d) + KP_UPPER(c, d);
#undef KP_LOWER
#undef KP_UPPER
  const Vec all = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  const Vec8 half = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

// Columns of x that stay in the first cache while rows of the weight pass: a multiple of every group.
constexpr int64_t columns_at_once(int rows) {
  return rows <= 2 ? 4096 : rows <= 4 ? 2048 : rows <= 8 ? 1024 : 512;
}

// A cache line of the row that is multiplied after this one. Rows of some thousand columns are pages of memory, at
// whose ends the processor stops to fetch ahead by itself: without this one row of x took 1.4 (4 bits) to 2.1 times as
// long.
template <int kWeights>
KP_PRIMITIVE void prefetch_below(const DotPart& part, const uint8_t* codes, int weight) {
  cpu::prefetch_near(codes + (weight + kWeights) * part.code_stride);
}

// Loops over sums are unrolled, or these would lie in memory. Columns [begin, end) are added to the sums; begin is a
// multiple of columns_at_once.
template <Format kFormat, int kRows, int kWeights>
KP_PRIMITIVE void multiply_rows(const DotPart& part, int64_t row, int64_t begin, int64_t end) {
  constexpr bool kAtOnce = kWeights * kRows >= 12 || !has_4_bits(kFormat);  // even and odd columns in one sum
  Vec sums[kWeights][kRows][kAtOnce ? 1 : 2] = {};
  const uint8_t* codes = part.codes + row * part.code_stride;
  if constexpr (has_4_bits(kFormat)) {
    const __m512i groups = lane_groups<kFormat>();
    const Vec values = code_values<kFormat>();
    Tables<kFormat> tables[kWeights] = {};
    for (int64_t first = begin; first < end; first += kDotStep) {
      const int64_t available = (part.k - first + 1) / 2;
#pragma GCC unroll 16
      for (int i = 0; i < kWeights; ++i) {
        if ((first & (part.group - 1)) == 0 || part.group < kDotStep) {
          tables[i] = tables_of<kFormat>(part, row + i, first, values);
        }
        if ((first & 127) == 0) prefetch_below<kWeights>(part, codes + first / 2, i);
        VecU weights[2];
        decode<kFormat>(tables[i], codes + i * part.code_stride + first / 2, available, groups, weights);
#pragma GCC unroll 16
        for (int j = 0; j < kRows; ++j) {
          const uint16_t* x = part.x + first * kRows + j * kDotStep;
          sums[i][j][0] = cpu::add_dots(sums[i][j][0], weights[0], cpu::load_storage<VecU>(x));
          Vec& of_odd = sums[i][j][kAtOnce ? 0 : 1];
          of_odd = cpu::add_dots(of_odd, weights[1], cpu::load_storage<VecU>(x + 32));
        }
      }
    }
  } else {
    for (int64_t first = begin; first < end; first += 32) {
#pragma GCC unroll 16
      for (int i = 0; i < kWeights; ++i) {
        const uint16_t* x = part.x + first / kDotStep * kDotStep * kRows + first % kDotStep;
        if (first % 64 == 0) prefetch_below<kWeights>(part, codes + first, i);
        const VecU weights =
            decode_bytes<kFormat>(part, row + i, first, codes + i * part.code_stride + first, part.k - first);
#pragma GCC unroll 16
        for (int j = 0; j < kRows; ++j) {
          sums[i][j][0] = cpu::add_dots(sums[i][j][0], weights, cpu::load_storage<VecU>(x + j * kDotStep));
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i) {
    float* to = part.sums + (row + i) * kDotSums;
    const auto sum = [&](int j) { return kAtOnce ? sums[i][j][0] : sums[i][j][0] + sums[i][j][1]; };
    if constexpr (kRows % 4 == 0) {
#pragma GCC unroll 16
      for (int j = 0; j < kRows; j += 4) {
        Vec4 four = sums_of_four(sum(j), sum(j + 1), sum(j + 2), sum(j + 3)), before = {};
        if (begin != 0) __builtin_memcpy(&before, to + j, sizeof(before));
        four += before;
        __builtin_memcpy(to + j, &four, sizeof(four));
      }
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < kRows; ++j) to[j] = (begin == 0 ? 0.0f : to[j]) + cpu::horizontal_sum(sum(j));
    }
  }
}

// Integers of 8 bits and so few rows that decoding is most of the work: codes become floats, and a group's scale and
// zero are applied to its sums. x is widened once for all rows of the weight.
template <int kRows, int kWeights>
KP_PRIMITIVE void multiply_byte_rows(const DotPart& part, int64_t row, int64_t begin, int64_t end) {
  Vec totals[kWeights][kRows] = {};
  const uint8_t* codes = part.codes + row * part.code_stride;
  for (int64_t first = begin; first < end; first += part.group) {
    const int64_t behind = first + part.group < end ? first + part.group : end;
    Vec sums[kWeights][kRows] = {}, of_x[kRows] = {};
    for (int64_t column = first; column < behind; column += 16) {
      const int64_t left = part.k - column;
      const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
      Vec x[kRows];
#pragma GCC unroll 4
      for (int j = 0; j < kRows; ++j) {
        const uint16_t* from = part.x + column / kDotStep * kDotStep * kRows + j * kDotStep + column % kDotStep;
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        x[j] = reinterpret_cast<Vec>(_mm512_slli_epi32(wide, 16));
        of_x[j] += x[j];
      }
#pragma GCC unroll 16
      for (int i = 0; i < kWeights; ++i) {
        if ((column & 63) == 0) prefetch_below<kWeights>(part, codes + column, i);
        const __m128i stored = _mm_maskz_loadu_epi8(mask, codes + i * part.code_stride + column);
        const Vec values = reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(stored)));
#pragma GCC unroll 4
        for (int j = 0; j < kRows; ++j) sums[i][j] += values * x[j];
      }
    }
    const int64_t group = first >> part.group_shift;
#pragma GCC unroll 16
    for (int i = 0; i < kWeights; ++i) {
      const Vec scale = cpu::broadcast(scale_at<Format::kInt8>(part, row + i, group));
      const Vec zero = cpu::broadcast(static_cast<float>(zero_at<Format::kInt8>(part, row + i, group)));
#pragma GCC unroll 4
      for (int j = 0; j < kRows; ++j) totals[i][j] += (sums[i][j] - zero * of_x[j]) * scale;
    }
  }
  for (int i = 0; i < kWeights; ++i) {
    float* to = part.sums + (row + i) * kDotSums;
    for (int j = 0; j < kRows; ++j) to[j] = (begin == 0 ? 0.0f : to[j]) + cpu::horizontal_sum(totals[i][j]);
  }
}

template <Format kFormat, int kRows, int kWeights>
KP_PRIMITIVE void multiply_some(const DotPart& part, int64_t row, int64_t begin, int64_t end) {
  if constexpr (kFormat == Format::kInt8 && kRows <= 2) {
    multiply_byte_rows<kRows, kWeights>(part, row, begin, end);
  } else {
    multiply_rows<kFormat, kRows, kWeights>(part, row, begin, end);
  }
}

// Several rows of the weight at once where sums would otherwise wait for one another.
template <Format kFormat, int kRows>
void multiply_format(const DotPart& part) {
  constexpr int kWeights = kRows <= 2 ? 4 : kRows <= 4 ? 2 : 1;
  int64_t begin = 0;
  do {  // once where there are no columns: sums are 0
    const int64_t left = part.k - begin, end = begin + (left < columns_at_once(kRows) ? left : columns_at_once(kRows));
    int64_t row = 0;
    for (; row + kWeights <= part.rows; row += kWeights) {
      multiply_some<kFormat, kRows, kWeights>(part, row, begin, end);
    }
    for (; row < part.rows; ++row) multiply_some<kFormat, kRows, 1>(part, row, begin, end);
    begin = end;
  } while (begin < part.k);
}

template <Format kFormat>
void multiply_by_rows(const DotPart& part) {
  switch (dot_rows(part.m)) {
    case 1:
      return multiply_format<kFormat, 1>(part);
    case 2:
      return multiply_format<kFormat, 2>(part);
    case 4:
      return multiply_format<kFormat, 4>(part);
    case 8:
      return multiply_format<kFormat, 8>(part);
    case 12:
      return multiply_format<kFormat, 12>(part);
    default:
      return multiply_format<kFormat, 16>(part);
  }
}

}  // namespace

void arrange_dots(Format format, const uint16_t* row, int64_t k, uint16_t* to, int64_t stride) {
  for (int64_t first = 0; first < k; first += kDotStep) {
    for (int64_t i = 0; i < kDotStep; ++i) {
      const int64_t column = first + (has_4_bits(format) ? (i < 32 ? 2 * i : 2 * (i - 32) + 1) : i);
      to[first / kDotStep * stride + i] = column < k ? row[column] : 0;
    }
  }
}

void multiply_dots(const DotPart& part) {
  switch (part.format) {
    case Format::kNvfp4:
      return multiply_by_rows<Format::kNvfp4>(part);
    case Format::kMxfp4:
      return multiply_by_rows<Format::kMxfp4>(part);
    case Format::kInt4:
      return multiply_by_rows<Format::kInt4>(part);
    default:
      return multiply_by_rows<Format::kInt8>(part);
  }
}

}  // namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE

#endif
