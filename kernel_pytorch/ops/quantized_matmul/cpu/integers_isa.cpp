// kp-isa: v4vnni
// Few rows of x times rows of a weight in few bits, by dot products of bytes. Codes are unsigned bytes as they lie in
// memory (E2M1: twice the value plus 12, by one shuffle); x is an integer of 24 bits relative to the largest of 128
// columns, in three digits, with more than two rows 16 bits in two. So 64 weights take three instructions, where floats
// take three for 16, and sums are exact until a group's end. What three digits lose of x is what an fp32 sum would lose
// of its smallest terms.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/integers.h"

#if defined(__AVX512VNNI__)

namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::Vec;
using cpu::VecI;
using cpu::VecU;

// What lies in memory as x: value * 2^(21 - exponent) in digits of -128 to 127; one more bit would not fit the highest.
constexpr int kIntegerBits = 21, kLeastExponent = -100;

// The column of a unit that byte i of vector v has: of 4-bit codes the even columns and the odd ones; of 8-bit codes
// halves of groups, so that both vectors have a group in the same lanes.
KP_PRIMITIVE int column_of(Format format, int groups, int v, int i) {
  if (has_4_bits(format)) return 2 * i + v;
  const int half = 64 / groups;
  return i / half * 2 * half + v * half + i % half;
}

template <class T>
KP_PRIMITIVE bool arrange(const IntegerRow& source, IntegerUnit* to) {
  const T* row = static_cast<const T*>(source.data);
  const Format format = source.format;
  const int64_t k = source.k, stride = integer_rows(source.rows);
  const int dropped = 8 * (3 - integer_digits(source.rows));
  uint32_t largest_of_all = 0;
  uint8_t places[128];
  for (int i = 0; i < 128; ++i) {
    places[i] = static_cast<uint8_t>(column_of(format, static_cast<int>(kUnitColumns / source.group), i / 64, i % 64));
  }
  for (int64_t first = 0; first < k; first += kUnitColumns, to += stride) {
    Vec values[8];
    VecU largest = {};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int64_t left = k - first - 16 * i;
      values[i] = left >= 16 ? cpu::load(row + first + 16 * i)
                  : left > 0 ? cpu::load_partial(row + first + 16 * i, left)
                             : Vec{};
      largest = cpu::max(largest, cpu::bits_of(cpu::abs(values[i])));
    }
    uint32_t amax = 0;
    for (int i = 0; i < 16; ++i) amax = largest[i] > amax ? largest[i] : amax;
    largest_of_all = amax > largest_of_all ? amax : largest_of_all;
    const int32_t own = static_cast<int32_t>(amax >> 23) - 127, exponent = own < kLeastExponent ? kLeastExponent : own;
    const Vec factor = cpu::broadcast(from_bits(static_cast<uint32_t>(kIntegerBits - dropped - exponent + 127) << 23));
    // E2M1's bytes are twice its values.
    const int32_t down = exponent - kIntegerBits - (is_e2m1(format) ? 1 : 0);
    to->scale = from_bits(static_cast<uint32_t>(down + 127) << 23);
    alignas(64) uint8_t digits[3][128];
    alignas(64) int32_t integers[128];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512i integer = _mm512_maskz_cvtps_epi32(cpu::kAllLanes, reinterpret_cast<__m512>(values[i] * factor));
      const VecU whole = reinterpret_cast<VecU>(integer) << dropped;
      cpu::store_storage(integers + 16 * i, whole);
      const VecU digit = (whole + 0x808080u) ^ 0x808080u;
      cpu::store_storage(digits[0] + 16 * i, cpu::narrow_to_8(digit & 0xffu));
      cpu::store_storage(digits[1] + 16 * i, cpu::narrow_to_8(digit >> 8 & 0xffu));
      cpu::store_storage(digits[2] + 16 * i, cpu::narrow_to_8(digit >> 16 & 0xffu));
    }
    int32_t sums[16] = {};
    for (int i = 0; i < 128; ++i) {
      for (int digit = 0; digit < 3; ++digit) {
        to->digits[i / 64][digit][i % 64] = static_cast<int8_t>(digits[digit][places[i]]);
      }
      sums[i % 64 / 4] += integers[places[i]];
    }
    for (int lane = 0; lane < 16; ++lane) to->sums[lane] = static_cast<float>(sums[lane]);
  }
  return largest_of_all < kInfinityBits;
}

// Columns of x that stay in the first cache while rows of the weight pass.
constexpr int64_t columns_at_once(int rows) {
  return rows <= 2 ? 4096 : 2048;
}

// What holds for the groups of some columns of a row, as floats.
struct alignas(64) Groups {
  float scales[4096 / 16 + 16], zeros[4096 / 32 + 16];
};
template <Format kFormat>
KP_PRIMITIVE void load_groups(const IntegerPart& part, int64_t row, int64_t first, int64_t count, Groups& to) {
  const int64_t place = row * part.groups + first;
  for (int64_t i = 0; i < count; i += 16) {
    const auto mask = static_cast<__mmask16>(count - i >= 16 ? 0xffffu : (1u << (count - i)) - 1);
    Vec scales;
    if constexpr (is_integer(kFormat)) {
      const auto stored = reinterpret_cast<cpu::VecU16>(
          _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(part.scales) + place + i));
      scales = part.has_half_scales ? cpu::float16_to_float(stored) : cpu::bfloat16_to_float(stored);
    } else {
      const auto stored = reinterpret_cast<cpu::VecU8>(
          _mm_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(part.scales) + place + i));
      if constexpr (kFormat == Format::kNvfp4) {
        scales = cpu::float8_e4m3_to_float(stored);
      } else {
        const VecU bytes = cpu::widen_bits(stored);
        const VecU powers = cpu::select(bytes == 0u, cpu::broadcast(0x00400000u), bytes << 23);
        scales = cpu::from_bits(cpu::select(bytes == 0xffu, cpu::broadcast(kNaNBits), powers));
      }
    }
    cpu::store(to.scales + i, scales);
    if constexpr (!is_integer(kFormat)) continue;
    if (part.zeros == nullptr) continue;
    const auto zeros = reinterpret_cast<cpu::VecU8>(_mm_maskz_loadu_epi8(mask, part.zeros + place + i));
    cpu::store(to.zeros + i, __builtin_convertvector(reinterpret_cast<VecI>(cpu::widen_bits(zeros)), Vec));
  }
}

// The lanes of a unit from the floats of its groups.
template <int kGroups>
KP_PRIMITIVE Vec by_lane(const float* of_groups) {
  if constexpr (kGroups == 1) return cpu::broadcast(*of_groups);
  const Vec v = cpu::load(of_groups);
  if constexpr (kGroups == 2) return __builtin_shufflevector(v, v, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  if constexpr (kGroups == 4) return __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}

// A unit of a row of the weight as bytes from 0 on, of which so many are there.
template <Format kFormat, int kGroups, bool kWhole>
KP_PRIMITIVE void load_codes(const uint8_t* codes, [[maybe_unused]] int64_t available, __m512i (&bytes)[2]) {
  const auto load = [&](int64_t first) __attribute__((always_inline)) {
    if constexpr (kWhole) return _mm512_loadu_si512(codes + first);
    const int64_t count = available - first;
    const uint64_t mask = count >= 64 ? ~uint64_t{0} : count > 0 ? (uint64_t{1} << count) - 1 : 0;
    return _mm512_maskz_loadu_epi8(mask, codes + first);
  };
  bytes[0] = load(0);
  if constexpr (has_4_bits(kFormat)) {
    const __m512i low = _mm512_set1_epi8(15);
    bytes[1] = _mm512_and_si512(_mm512_srli_epi16(bytes[0], 4), low);
    bytes[0] = _mm512_and_si512(bytes[0], low);
    if constexpr (is_e2m1(kFormat)) {
      const __m512i table = _mm512_maskz_broadcast_i32x4(
          cpu::kAllLanes, _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
      bytes[0] = _mm512_shuffle_epi8(table, bytes[0]);
      bytes[1] = _mm512_shuffle_epi8(table, bytes[1]);
    }
  } else {
    bytes[1] = load(64);
    if constexpr (kGroups > 1) {
      constexpr int kFirst = kGroups == 2 ? 0x44 : 0x88, kSecond = kGroups == 2 ? 0xee : 0xdd;
      const __m512i first = _mm512_maskz_shuffle_i64x2(0xff, bytes[0], bytes[1], kFirst);
      bytes[1] = _mm512_maskz_shuffle_i64x2(0xff, bytes[0], bytes[1], kSecond);
      bytes[0] = first;
    }
  }
}

// Which rows of the weight are multiplied at once, and how far behind a byte that is read lies the one that is fetched:
// rows may be whole pages of memory, at whose ends the processor stops to fetch ahead by itself.
struct Walk {
  int64_t step, ahead;
};

template <Format kFormat, int kGroups, int kRows, int kWeights, bool kWhole>
KP_PRIMITIVE void multiply_unit(const IntegerPart& part, const Walk& walk, const uint8_t* codes, int64_t available,
                                const IntegerUnit* x, const Groups* groups, int64_t group,
                                Vec (&totals)[kWeights][kRows]) {
  __m512i bytes[kWeights][2];
#pragma GCC unroll 4
  for (int i = 0; i < kWeights; ++i) {
    const uint8_t* own = codes + i * walk.step * part.code_stride;
    load_codes<kFormat, kGroups, kWhole>(own, available, bytes[i]);
    for (int line = 0; line < (has_4_bits(kFormat) ? 1 : 2); ++line) cpu::prefetch_near(own + walk.ahead + 64 * line);
  }
#pragma GCC unroll 4
  for (int j = 0; j < kRows; ++j) {
    constexpr int kLowest = 3 - integer_digits(kRows);
    __m512i sums[kWeights][3];
#pragma GCC unroll 3
    for (int digit = kLowest; digit < 3; ++digit) {
      const __m512i first = _mm512_load_si512(x[j].digits[0][digit]);
      const __m512i second = _mm512_load_si512(x[j].digits[1][digit]);
#pragma GCC unroll 4
      for (int i = 0; i < kWeights; ++i) {
        sums[i][digit] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes[i][0], first);
        sums[i][digit] = _mm512_dpbusd_epi32(sums[i][digit], bytes[i][1], second);
      }
    }
    const Vec of_x = cpu::load(x[j].sums);
#pragma GCC unroll 4
    for (int i = 0; i < kWeights; ++i) {
      const VecI upper = (reinterpret_cast<VecI>(sums[i][2]) << 8) + reinterpret_cast<VecI>(sums[i][1]);
      Vec sum = __builtin_convertvector(upper, Vec) * 256.0f;
      if constexpr (kLowest == 0) sum += __builtin_convertvector(reinterpret_cast<VecI>(sums[i][0]), Vec);
      if (is_integer(kFormat) && part.zeros != nullptr) {
        sum -= by_lane<kGroups>(groups[i].zeros + group) * of_x;
      } else {
        sum -= (is_integer(kFormat) ? static_cast<float>(middle_code(kFormat)) : 12.0f) * of_x;
      }
      totals[i][j] += sum * x[j].scale * by_lane<kGroups>(groups[i].scales + group);
    }
  }
}

// Rows `row`, `row` + walk.step and so on. Columns [begin, end) are added to the sums; begin is a multiple of
// columns_at_once.
template <Format kFormat, int kGroups, int kRows, int kWeights>
KP_PRIMITIVE void multiply_rows(const IntegerPart& part, const Walk& walk, int64_t row, int64_t begin, int64_t end) {
  constexpr int64_t kGroup = kUnitColumns / kGroups;
  Groups groups[kWeights];
  for (int i = 0; i < kWeights; ++i) {
    load_groups<kFormat>(part, row + i * walk.step, begin / kGroup, (end - begin + kGroup - 1) / kGroup, groups[i]);
  }
  Vec totals[kWeights][kRows] = {};
  const uint8_t* codes = part.codes + row * part.code_stride;
  int64_t first = begin;
  for (; first + kUnitColumns <= end; first += kUnitColumns) {
    multiply_unit<kFormat, kGroups, kRows, kWeights, true>(part, walk, codes + code_bytes(kFormat, first), 0,
                                                           part.x + first / kUnitColumns * kRows, groups,
                                                           (first - begin) / kGroup, totals);
  }
  if (first < end) {
    multiply_unit<kFormat, kGroups, kRows, kWeights, false>(
        part, walk, codes + code_bytes(kFormat, first), code_bytes(kFormat, end - first),
        part.x + first / kUnitColumns * kRows, groups, (first - begin) / kGroup, totals);
  }
  for (int i = 0; i < kWeights; ++i) {
    float* to = part.sums + (row + i * walk.step) * kIntegerSums;
    for (int j = 0; j < kRows; ++j) to[j] = (begin == 0 ? 0.0f : to[j]) + cpu::horizontal_sum(totals[i][j]);
  }
}

// Four rows of the weight at once share what is loaded of x: neighbours, or of 8-bit codes that are read whole the rows
// of four runs, which memory answers faster (27 against 24 GB/s; of 4-bit codes 19 against 22).
template <Format kFormat, int kGroups, int kRows>
void multiply_all(const IntegerPart& part) {
  constexpr int kWeights = 4;
  const bool has_runs = !has_4_bits(kFormat) && part.k <= columns_at_once(kRows);
  const int64_t fours = part.rows / kWeights;
  const Walk walk{has_runs ? fours : 1, has_runs ? 2048 : kWeights * part.code_stride};
  int64_t begin = 0;
  do {  // once where there are no columns: sums are 0
    const int64_t left = part.k - begin, end = begin + (left < columns_at_once(kRows) ? left : columns_at_once(kRows));
    for (int64_t i = 0; i < fours; ++i) {
      multiply_rows<kFormat, kGroups, kRows, kWeights>(part, walk, has_runs ? i : kWeights * i, begin, end);
    }
    for (int64_t row = kWeights * fours; row < part.rows; ++row) {
      multiply_rows<kFormat, kGroups, kRows, 1>(part, walk, row, begin, end);
    }
    begin = end;
  } while (begin < part.k);
}
template <Format kFormat, int kGroups>
void multiply_format(const IntegerPart& part) {
  switch (integer_rows(part.m)) {
    case 1:
      return multiply_all<kFormat, kGroups, 1>(part);
    case 2:
      return multiply_all<kFormat, kGroups, 2>(part);
    default:
      return multiply_all<kFormat, kGroups, 4>(part);
  }
}
template <Format kFormat>
void multiply_group(const IntegerPart& part) {
  if (part.group == 32) return multiply_format<kFormat, 4>(part);
  if (part.group == 64) return multiply_format<kFormat, 2>(part);
  return multiply_format<kFormat, 1>(part);
}

}  // namespace

bool arrange_integers(const IntegerRow& row, IntegerUnit* to) {
  return row.is_half ? arrange<Float16>(row, to) : arrange<BFloat16>(row, to);
}

void multiply_integers(const IntegerPart& part) {
  switch (part.format) {
    case Format::kNvfp4:
      return multiply_format<Format::kNvfp4, 8>(part);
    case Format::kMxfp4:
      return multiply_format<Format::kMxfp4, 4>(part);
    case Format::kInt4:
      return multiply_group<Format::kInt4>(part);
    default:
      return multiply_group<Format::kInt8>(part);
  }
}

}  // namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE

#endif
