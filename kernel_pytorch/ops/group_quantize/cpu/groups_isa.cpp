// Quantising by groups and back on the lanes of the CPU, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/bit_stream.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/group_quantize/cpu/lanes.h"
#include "kernel_pytorch/ops/group_quantize/cpu/rows.h"

namespace kernel_pytorch::group_quantize::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::kLanes;
using cpu::VecU16;
using cpu::VecU8;

template <class T>
void load_floats(const void* from, int64_t count, float* to) {
  const T* row = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(to + i, cpu::load(row + i));
  if (i < count) cpu::store_partial(to + i, cpu::load_partial(row + i, count - i), count - i);
}
template <class T>
void store_floats(const float* from, int64_t count, void* to) {
  T* row = static_cast<T*>(to);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(row + i, cpu::load(from + i));
  if (i < count) cpu::store_partial(row + i, cpu::load_partial(from + i, count - i), count - i);
}
void store_e4m3(const float* from, int64_t count, void* to) {
  auto* row = static_cast<Float8E4M3*>(to);
  for (int64_t i = 0; i < count; ++i) row[i] = from_float<Float8E4M3>(from[i]);
}

// Of the groups of a part.
struct alignas(64) PartRanges {
  float amax[kPartGroups];                    // infinity where there is a NaN, too
  float low[kPartGroups], high[kPartGroups];  // at most 0, at least 0
};
struct alignas(64) PartScales {
  float value[kPartGroups], inverse[kPartGroups];
  int32_t zero[kPartGroups];
};

KP_PRIMITIVE Vec load_values(const QuantizePart& part, int64_t at) {
  return at + kLanes <= part.count ? cpu::load(part.values + at) : cpu::load_partial(part.values + at, part.count - at);
}

KP_PRIMITIVE void find_ranges(const QuantizePart& part, PartRanges& ranges) {
  for (int64_t first = 0, index = 0; first < part.count; first += part.group, ++index) {
    const int64_t end = part.count - first < part.group ? part.count : first + part.group;
    VecI amax = {};
    for (int64_t i = first; i < end; i += kLanes) {
      const VecI magnitudes = reinterpret_cast<VecI>(cpu::bits_of(cpu::abs(load_values(part, i))));
      amax = magnitudes > amax ? magnitudes : amax;
    }
    amax = amax < static_cast<int32_t>(kInfinityBits) ? amax : VecI{} + static_cast<int32_t>(kInfinityBits);  // of NaN
    ranges.amax[index] = cpu::horizontal_max(cpu::from_bits(reinterpret_cast<VecU>(amax)));
    if (part.zeros == nullptr) continue;
    Vec low = {}, high = {};
    for (int64_t i = first; i < end; i += kLanes) {
      const Vec values = load_values(part, i);
      low = cpu::min(values, low);
      high = cpu::max(values, high);
    }
    ranges.low[index] = -cpu::horizontal_max(-low);
    ranges.high[index] = cpu::horizontal_max(high);
  }
}

template <Format kFormat>
KP_PRIMITIVE void find_scales(const QuantizePart& part, const PartRanges& ranges, PartScales& scales) {
  const int64_t groups = (part.count + part.group - 1) / part.group;
  for (int64_t i = 0; i < groups; i += kLanes) {
    const GroupScales some = scales_of<kFormat>(
        {cpu::bits_of(cpu::load(ranges.amax + i)), cpu::load(ranges.low + i), cpu::load(ranges.high + i)},
        part.zeros != nullptr, part.scale_type, part.tensor_scale);
    cpu::store(scales.value + i, some.value);
    cpu::store(scales.inverse + i, some.inverse);
    cpu::store_storage(scales.zero + i, some.zero);
    const int64_t left = groups - i < kLanes ? groups - i : kLanes;
    const auto store_bytes = [&](uint8_t* to, VecU bytes) {
      cpu::store_storage_partial<VecU8, 1>(to, cpu::narrow_to_8(bytes), left);
    };
    if constexpr (is_integer(kFormat)) {
      cpu::store_partial(part.scales + i, some.stored, left);
      if (part.zeros != nullptr) store_bytes(part.zeros + i, reinterpret_cast<VecU>(some.zero));
    } else {
      store_bytes(part.scale_bytes + i, scale_bytes<kFormat>(some.stored));
    }
  }
}

// Random bits of the elements of a part: those of values[i] are halves[i] of what is returned.
struct alignas(64) PartBits {
  static constexpr int64_t kHalves = cpu::kPhiloxBlocks * kPhiloxElements;  // drawn at once
  uint32_t words[(kPartColumns + kPhiloxElements + kHalves) / 2 + kLanes];
};
KP_PRIMITIVE const uint32_t* draw_bits(const QuantizePart& part, PartBits& bits) {
  const int64_t block = part.first_element / kPhiloxElements, before = part.first_element % kPhiloxElements;
  for (int64_t i = 0; i < before + part.count; i += PartBits::kHalves) {
    cpu::philox_many(static_cast<uint64_t>(part.seed[0]), static_cast<uint64_t>(part.seed[1]),
                     static_cast<uint64_t>(block + i / kPhiloxElements), bits.words + i / 2);
  }
  return bits.words;
}

// Codes of a byte each to where they lie in `bits` each; behind the last one are zeros.
template <Format kFormat>
KP_PRIMITIVE void pack(const uint16_t* pairs, int64_t count, uint8_t* bytes) {
  if constexpr (is_bit_stream(kFormat)) {
    for (int64_t i = 0; i < count; i += 8) {
      uint64_t eight, word = 0;
      __builtin_memcpy(&eight, pairs + i / 2, 8);
#if defined(__BMI2__)
      word = _pext_u64(eight, 0x0101010101010101u * last_code(kFormat));
#else
      for (int j = 0; j < 8; ++j) word |= (eight >> (8 * j) & 0xff) << (j * code_bits(kFormat));
#endif
      const int64_t left = code_bytes(kFormat, count - i);
      __builtin_memcpy(bytes + code_bytes(kFormat, i), &word,
                       static_cast<size_t>(left < code_bits(kFormat) ? left : code_bits(kFormat)));
    }
  } else if constexpr (has_4_bits(kFormat)) {
    for (int64_t i = 0; i < (count + 1) / 2; ++i) bytes[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 4);
  } else {
    __builtin_memcpy(bytes, pairs, static_cast<size_t>(count));
  }
}

template <Format kFormat, bool kStochastic>
void quantize(const QuantizePart& part) {
  PartRanges ranges;
  PartScales scales;
  find_ranges(part, ranges);
  find_scales<kFormat>(part, ranges, scales);
  PartBits bits;
  const char* random = nullptr;  // two bytes of each element
  if constexpr (kStochastic) {
    random = reinterpret_cast<const char*>(draw_bits(part, bits)) + part.first_element % kPhiloxElements * 2;
  }
  alignas(64) uint16_t pairs[(kPartColumns + kLanes) / 2];
  auto* codes = reinterpret_cast<uint8_t*>(pairs);
  for (int64_t first = 0, index = 0; first < part.count; first += part.group, ++index) {
    const int64_t end = part.count - first < part.group ? part.count : first + part.group;
    for (int64_t i = first; i < end; i += kLanes) {
      Vec own = {};
      if constexpr (kStochastic) {
        const VecU halves = cpu::widen_bits(cpu::load_storage<VecU16>(random + 2 * i));
        own = __builtin_convertvector(reinterpret_cast<VecI>(halves), Vec);
      }
      const VecU some = codes_of<kFormat, kStochastic>(load_values(part, i), scales.value[index], scales.inverse[index],
                                                       scales.zero[index], own);
      cpu::store_storage(codes + i, cpu::narrow_to_8(some));
    }
  }
  __builtin_memset(codes + part.count, 0, part.count % 8 == 0 ? 0 : static_cast<size_t>(8 - part.count % 8));
  pack<kFormat>(pairs, part.count, part.codes);
}

// The values of the codes of 4 bits.
alignas(64) constexpr float kE2m1Values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
alignas(64) constexpr float kIntegers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// kLanes columns of 4-bit codes at a time, where a vector has the values of all codes, or of E2M1's without signs, and
// decoding is one shuffle. Returns how many columns of the group are done.
template <Format kFormat>
KP_PRIMITIVE int64_t dequantize_lanes([[maybe_unused]] const uint8_t* bytes, [[maybe_unused]] int64_t count,
                                      [[maybe_unused]] float scale, [[maybe_unused]] float tensor_scale,
                                      [[maybe_unused]] int32_t zero, [[maybe_unused]] float* values) {
#if defined(__AVX512F__)
  if constexpr (has_4_bits(kFormat)) {
    Vec table = cpu::load(is_integer(kFormat) ? kIntegers : kE2m1Values);
    if constexpr (is_integer(kFormat)) table -= static_cast<float>(zero);
    table *= scale;
    if constexpr (kFormat == Format::kNvfp4) table *= tensor_scale;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      // Lane j has byte j / 2, and of it the low or the high half; a shuffle takes its index modulo 16.
      uint64_t eight;
      __builtin_memcpy(&eight, bytes + i / 2, 8);
      const __m128i loaded = _mm_cvtsi64_si128(static_cast<int64_t>(eight));
      const auto twice = cpu::widen_bits(reinterpret_cast<VecU8>(_mm_unpacklo_epi8(loaded, loaded)));
      VecU shifts;
      for (int j = 0; j < kLanes; ++j) shifts[j] = j % 2 * 4;  // a constant
      cpu::store(values + i, __builtin_shuffle(table, reinterpret_cast<VecI>(twice >> shifts)));
    }
    return i;
  }
#elif defined(__AVX2__)
  if constexpr (is_e2m1(kFormat)) {
    Vec table = cpu::load(kE2m1Values) * scale;
    if constexpr (kFormat == Format::kNvfp4) table *= tensor_scale;
    alignas(32) static constexpr uint32_t kShifts[] = {0, 4, 8, 12, 16, 20, 24, 28};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      uint32_t word;
      __builtin_memcpy(&word, bytes + i / 2, 4);
      const VecU codes = cpu::broadcast(word) >> cpu::load_storage<VecU>(kShifts);
      const __m256 magnitudes =
          _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(table), reinterpret_cast<__m256i>(codes));
      cpu::store(values + i, cpu::from_bits(reinterpret_cast<VecU>(magnitudes) ^ (codes & 8u) << 28));
    }
    return i;
  }
#endif
  return 0;
}

// The scales of a part's groups.
template <Format kFormat>
KP_PRIMITIVE void load_scales(const DequantizePart& part, float* scales) {
  const int64_t groups = (part.count + part.group - 1) / part.group;
  for (int64_t i = 0; i < groups; i += kLanes) {
    const int64_t left = groups - i < kLanes ? groups - i : kLanes;
    const auto stored = cpu::load_storage_partial<VecU8, 1>(part.scale_bytes + i, left);
    if constexpr (kFormat == Format::kNvfp4) {
      cpu::store(scales + i, cpu::float8_e4m3_to_float(stored));
    } else {
      const VecU bytes = cpu::widen_bits(stored);
      const VecU powers = cpu::select(bytes == 0u, cpu::broadcast(0x00400000u), bytes << 23);
      cpu::store(scales + i, cpu::from_bits(cpu::select(bytes == 0xffu, cpu::broadcast(kNaNBits), powers)));
    }
  }
}

template <Format kFormat>
void dequantize(const DequantizePart& part) {
  alignas(64) float of_bytes[kPartGroups];
  if constexpr (!is_integer(kFormat)) load_scales<kFormat>(part, of_bytes);
  for (int64_t first = 0, index = 0; first < part.count; first += part.group, ++index) {
    const int64_t count = part.count - first < part.group ? part.count - first : part.group;
    const float scale = is_integer(kFormat) ? part.scales[index] : of_bytes[index];
    const int32_t zero = part.zeros != nullptr ? part.zeros[index] : middle_code(kFormat);
    const uint8_t* bytes = part.codes + code_bytes(kFormat, first);
    float* values = part.values + first;
    const auto value_of = [&](uint32_t code) {
      const float value = code_value<kFormat>(code, zero) * scale;
      return kFormat == Format::kNvfp4 ? value * part.tensor_scale : value;
    };
    if constexpr (is_bit_stream(kFormat)) {
      const int64_t available = code_bytes(kFormat, count);
      for (int64_t i = 0; i < count; i += kLanes) {
        const VecI codes = reinterpret_cast<VecI>(cpu::unpack_bits<code_bits(kFormat)>(bytes, i, available));
        const cpu::Vec decoded = __builtin_convertvector(codes - zero, cpu::Vec) * scale;
        if (i + kLanes <= count) {
          cpu::store(values + i, decoded);
        } else {
          cpu::store_partial(values + i, decoded, count - i);
        }
      }
    } else if constexpr (has_4_bits(kFormat)) {
      const int64_t done = dequantize_lanes<kFormat>(bytes, count, scale, part.tensor_scale, zero, values);
      for (int64_t i = done / 2; i < count / 2; ++i) {
        const uint32_t byte = bytes[i];
        values[2 * i] = value_of(byte & 15);
        values[2 * i + 1] = value_of(byte >> 4);
      }
      if (count % 2 != 0) values[count - 1] = value_of(bytes[count / 2] & 15);
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] = value_of(bytes[i]);
    }
  }
}

#define KP_BOTH_ROUNDINGS(format) \
  { quantize<Format::format, false>, quantize<Format::format, true> }

}  // namespace

extern const GroupKernels kGroupKernels = {
    {load_floats<float>, load_floats<BFloat16>, load_floats<Float16>},
    {store_floats<float>, store_floats<BFloat16>, store_floats<Float16>, store_e4m3},
    {KP_BOTH_ROUNDINGS(kNvfp4), KP_BOTH_ROUNDINGS(kMxfp4), KP_BOTH_ROUNDINGS(kMxfp8), KP_BOTH_ROUNDINGS(kInt4),
     KP_BOTH_ROUNDINGS(kInt8), KP_BOTH_ROUNDINGS(kInt2), KP_BOTH_ROUNDINGS(kInt3), KP_BOTH_ROUNDINGS(kInt5),
     KP_BOTH_ROUNDINGS(kInt6)},
    {dequantize<Format::kNvfp4>, dequantize<Format::kMxfp4>, dequantize<Format::kMxfp8>, dequantize<Format::kInt4>,
     dequantize<Format::kInt8>, dequantize<Format::kInt2>, dequantize<Format::kInt3>, dequantize<Format::kInt5>,
     dequantize<Format::kInt6>}};

#undef KP_BOTH_ROUNDINGS

}  // namespace kernel_pytorch::group_quantize::KP_ISA_NAMESPACE
