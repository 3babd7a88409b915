// Quantising by groups and back on the lanes of the CPU, built once per instruction level: loops over the elements of a
// group that compilers turn into lanes; the arithmetic of one element is the formats'.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/bit_stream.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/group_quantize/cpu/rows.h"

namespace kernel_pytorch::group_quantize::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::kLanes;
using cpu::VecI;

constexpr int64_t kMostGroup = 128;

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

KP_PRIMITIVE Range range_of(const float* values, int64_t count, bool has_zeros) {
  Range range{0, 0.0f, 0.0f};
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = group_format::bits_of(values[i]) & 0x7fffffff;
    range.amax = magnitude > range.amax ? magnitude : range.amax;
  }
  if (!has_zeros) return range;
  for (int64_t i = 0; i < count; ++i) {
    range.low = values[i] < range.low ? values[i] : range.low;
    range.high = values[i] > range.high ? values[i] : range.high;
  }
  return range;
}

template <Format kFormat, bool kStochastic>
void quantize(const QuantizePart& part) {
  for (int64_t first = 0, index = 0; first < part.count; first += part.group, ++index) {
    const int64_t count = part.count - first < part.group ? part.count - first : part.group;
    const float* values = part.values + first;
    const GroupScale scale = scale_of<kFormat>(range_of(values, count, part.zeros != nullptr), part.zeros != nullptr,
                                               part.scale_type, part.tensor_scale);
    if constexpr (is_integer(kFormat)) {
      part.scales[index] = scale.stored;
      if (part.zeros != nullptr) part.zeros[index] = static_cast<uint8_t>(scale.zero);
    } else {
      part.scale_bytes[index] = static_cast<uint8_t>(scale_byte<kFormat>(scale.stored));
    }
    alignas(64) uint32_t codes[kMostGroup] = {};
    if constexpr (kStochastic) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t element = part.first_element + first + i;
        const PhiloxBlock block = philox(static_cast<uint64_t>(part.seed[0]), static_cast<uint64_t>(part.seed[1]),
                                         static_cast<uint64_t>(element / kPhiloxElements));
        codes[i] = code_of<kFormat, true>(values[i], scale, block.bits(static_cast<int>(element % kPhiloxElements)));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) codes[i] = code_of<kFormat, false>(values[i], scale, 0);
    }
    uint8_t* bytes = part.codes + code_bytes(kFormat, first);
    if constexpr (is_bit_stream(kFormat)) {
      for (int64_t i = 0; i < count; i += 8) {
        uint64_t word = 0;
        for (int j = 0; j < 8; ++j) word |= uint64_t{codes[i + j]} << (j * code_bits(kFormat));
        const int64_t left = code_bytes(kFormat, count - i);
        __builtin_memcpy(bytes + code_bytes(kFormat, i), &word,
                         static_cast<size_t>(left < code_bits(kFormat) ? left : code_bits(kFormat)));
      }
    } else if constexpr (has_4_bits(kFormat)) {
      for (int64_t i = 0; i < (count + 1) / 2; ++i) {
        bytes[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
    }
  }
}

// 16 columns of 4-bit codes at a time: a vector has the values of all 16 codes, and decoding is one shuffle.
// Returns how many columns of the group are done.
template <Format kFormat>
KP_PRIMITIVE int64_t dequantize_lanes([[maybe_unused]] const uint8_t* bytes, [[maybe_unused]] int64_t count,
                                      [[maybe_unused]] float scale, [[maybe_unused]] float tensor_scale,
                                      [[maybe_unused]] int32_t zero, [[maybe_unused]] float* values) {
#if defined(__AVX512F__)
  if constexpr (has_4_bits(kFormat)) {
    cpu::Vec table;
    for (int i = 0; i < kLanes; ++i) table[i] = code_value<kFormat>(static_cast<uint32_t>(i), zero);
    table *= scale;
    if constexpr (kFormat == Format::kNvfp4) table *= tensor_scale;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      // Lane j has byte j / 2, and of it the low or the high half; a shuffle takes its index modulo 16.
      uint64_t eight;
      __builtin_memcpy(&eight, bytes + i / 2, 8);
      const __m128i loaded = _mm_cvtsi64_si128(static_cast<int64_t>(eight));
      const auto twice = cpu::widen_bits(reinterpret_cast<cpu::VecU8>(_mm_unpacklo_epi8(loaded, loaded)));
      cpu::VecU shifts;
      for (int j = 0; j < kLanes; ++j) shifts[j] = j % 2 * 4;  // a constant
      cpu::store(values + i, __builtin_shuffle(table, reinterpret_cast<cpu::VecI>(twice >> shifts)));
    }
    return i;
  }
#endif
  return 0;
}

template <Format kFormat>
void dequantize(const DequantizePart& part) {
  for (int64_t first = 0, index = 0; first < part.count; first += part.group, ++index) {
    const int64_t count = part.count - first < part.group ? part.count - first : part.group;
    float scale;
    if constexpr (is_integer(kFormat)) {
      scale = part.scales[index];
    } else if constexpr (kFormat == Format::kNvfp4) {
      scale = e4m3_value(part.scale_bytes[index]);
    } else {
      scale = e8m0_value(part.scale_bytes[index]);
    }
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
