// The rounding of ops/support/group_format/format_cuda.h in lanes, operation by operation, so that every code is the
// same: of scales a group in a lane, of codes an element. Compilers make no such lanes of the loops over its functions.
#pragma once

#include "kernel_pytorch/cpu/convert.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::group_quantize::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::Vec;
using cpu::VecI;
using cpu::VecU;

KP_PRIMITIVE Vec float_bits(uint32_t bits) {
  return cpu::from_bits(cpu::broadcast(bits));
}
// 1 where the mask is true.
KP_PRIMITIVE VecU one_where(VecI mask) {
  return reinterpret_cast<VecU>(-mask);
}

// Of magnitudes below 2^22: behind the addition there are no places behind the point.
KP_PRIMITIVE Vec nearest_integers(Vec values) {
  const Vec power = cpu::broadcast(12582912.0f);  // 1.5 * 2^23
  return (values + power) - power;
}
KP_PRIMITIVE Vec floors(Vec values) {
  const Vec nearest = nearest_integers(values);
  return cpu::select(nearest > values, nearest - 1.0f, nearest);
}

// ---- scales ----

struct Ranges {
  VecU amax;
  Vec low, high;
};
struct GroupScales {
  Vec stored, value, inverse;
  VecI zero;
};

KP_PRIMITIVE Vec round_positives(Vec values, int mantissa_bits, int least_exponent) {
  const VecU bits = cpu::bits_of(values);
  const int dropped = 23 - mantissa_bits;
  const VecU half = ((1u << (dropped - 1)) - 1) + (bits >> dropped & 1u);
  const Vec normal = cpu::from_bits((bits + half) >> dropped << dropped);
  const Vec even = float_bits(static_cast<uint32_t>(least_exponent + dropped + 127) << 23);
  const Vec least = float_bits(static_cast<uint32_t>(least_exponent + 127) << 23);
  return cpu::select(values < least, (values + even) - even, normal);
}
KP_PRIMITIVE Vec round_e4m3_lanes(Vec values) {
  return cpu::min(round_positives(values, 3, -6), cpu::broadcast(448.0f));
}
KP_PRIMITIVE VecU e4m3_codes(Vec values) {
  const VecU normal = (cpu::bits_of(values) >> 20) - (120u << 3);
  const VecI small = __builtin_convertvector(values * 0x1p9f, VecI);
  return cpu::select(values < 0x1p-6f, reinterpret_cast<VecU>(small), normal);
}

KP_PRIMITIVE Vec nearest_quotients(Vec values, Vec scale, Vec inverse) {
  const Vec guess = nearest_integers(values * inverse);
  const Vec above = cpu::fma_once(-(guess + 0.5f), scale, values),
            below = cpu::fma_once(-(guess - 0.5f), scale, values);
  const VecI is_odd = (__builtin_convertvector(guess, VecI) & 1) != 0;
  const VecI up = (above > 0.0f) | ((above == 0.0f) & is_odd), down = (below < 0.0f) | ((below == 0.0f) & is_odd);
  return guess - __builtin_convertvector(up, Vec) + __builtin_convertvector(down, Vec);  // a mask is -1
}

template <Format kFormat>
KP_PRIMITIVE GroupScales scales_of(const Ranges& ranges, bool has_zeros, ScaleType type, float tensor_scale) {
  const Vec amax = cpu::from_bits(ranges.amax);
  const Vec one = cpu::broadcast(1.0f);
  Vec stored;
  if constexpr (kFormat == Format::kNvfp4) {
    stored = round_e4m3_lanes(amax / cpu::broadcast(6.0f * tensor_scale));
  } else if constexpr (has_power_scale(kFormat)) {
    const VecI exponent = reinterpret_cast<VecI>(ranges.amax >> 23) - (kFormat == Format::kMxfp4 ? 2 : 8);
    stored =
        cpu::from_bits(cpu::select(exponent <= 0, cpu::broadcast(0x00400000u), reinterpret_cast<VecU>(exponent) << 23));
  } else {
    const Vec steps = cpu::broadcast(static_cast<float>(has_zeros ? last_code(kFormat) : middle_code(kFormat) - 1));
    const Vec exact = has_zeros ? ranges.high / steps - ranges.low / steps : amax / steps;
    const Vec rounded = type == ScaleType::kFloat16    ? round_positives(exact, 10, -14)
                        : type == ScaleType::kBFloat16 ? round_positives(exact, 7, -126)
                                                       : exact;
    stored = cpu::select(exact < kLeastIntegerScale, Vec{}, rounded);
  }
  stored = cpu::select(ranges.amax < kInfinityBits, stored, float_bits(kNaNBits));
  GroupScales scales{stored, kFormat == Format::kNvfp4 ? stored * tensor_scale : stored, Vec{},
                     cpu::broadcast(middle_code(kFormat))};
  const VecI is_scale = scales.value > 0.0f;
  scales.inverse = cpu::select(is_scale, one / scales.value, Vec{});
  if (is_integer(kFormat) && has_zeros) {
    const Vec zero = cpu::select(is_scale, nearest_quotients(-ranges.low, scales.value, scales.inverse), Vec{});
    scales.zero = __builtin_convertvector(cpu::min(zero, cpu::broadcast(static_cast<float>(last_code(kFormat)))), VecI);
  }
  return scales;
}
template <Format kFormat>
KP_PRIMITIVE VecU scale_bytes(Vec stored) {
  const VecU of_numbers = kFormat == Format::kNvfp4 ? e4m3_codes(stored) : cpu::bits_of(stored) >> 23;
  return cpu::select(stored >= 0.0f, of_numbers, cpu::broadcast(kFormat == Format::kNvfp4 ? 0x7fu : 0xffu));
}

// ---- codes ----

KP_PRIMITIVE Vec stochastic_quotients(Vec values, Vec scale, Vec inverse, Vec random) {
  const Vec guess = floors(values * inverse);
  const Vec rest = cpu::fma_once(-guess, scale, values);
  const Vec low = cpu::select(rest < 0.0f, guess - 1.0f, cpu::select(rest >= scale, guess + 1.0f, guess));
  const Vec share = cpu::fma_once(-low, scale, values);
  return cpu::select(share > random * 0x1p-16f * scale, low + 1.0f, low);
}

// Of how many of the boundaries a magnitude is past: with ties to the even code, or the greatest code that is not
// above it.
KP_PRIMITIVE VecU nearest_e2m1_codes(Vec magnitudes, Vec scale) {
  return one_where(magnitudes > 0.25f * scale) + one_where(magnitudes >= 0.75f * scale) +
         one_where(magnitudes > 1.25f * scale) + one_where(magnitudes >= 1.75f * scale) +
         one_where(magnitudes > 2.5f * scale) + one_where(magnitudes >= 3.5f * scale) +
         one_where(magnitudes > 5.0f * scale);
}
KP_PRIMITIVE VecU stochastic_e2m1_codes(Vec magnitudes, Vec scale, Vec random) {
  const VecU low = one_where(magnitudes >= 0.5f * scale) + one_where(magnitudes >= 1.0f * scale) +
                   one_where(magnitudes >= 1.5f * scale) + one_where(magnitudes >= 2.0f * scale) +
                   one_where(magnitudes >= 3.0f * scale) + one_where(magnitudes >= 4.0f * scale) +
                   one_where(magnitudes >= 6.0f * scale);
  const Vec step =
      cpu::select(low < 4u, cpu::broadcast(0.5f), cpu::select(low < 6u, cpu::broadcast(1.0f), cpu::broadcast(2.0f)));
  const Vec halves = __builtin_convertvector(reinterpret_cast<VecI>(low), Vec) * 0.5f;
  const Vec value = cpu::select(low < 2u, halves, cpu::from_bits((low << 22) + (126u << 23)));
  const Vec share = cpu::fma_once(-value, scale, magnitudes);
  return low + one_where((low < 7u) & (share > random * 0x1p-16f * (step * scale)));
}
KP_PRIMITIVE VecU stochastic_e4m3_codes(Vec magnitudes, Vec random) {
  const Vec base = cpu::select(magnitudes < 0x1p-6f, cpu::broadcast(0x1p-6f),
                               cpu::from_bits(cpu::bits_of(magnitudes) & kInfinityBits));
  const Vec step = base * 0.125f;
  const Vec inverse = cpu::from_bits((254u << 23) - cpu::bits_of(step));  // of a power of two
  const Vec low = floors(magnitudes * inverse) * step;
  const Vec value = cpu::select(magnitudes - low > random * 0x1p-16f * step, low + step, low);
  return e4m3_codes(cpu::min(value, cpu::broadcast(448.0f)));
}

// The codes of one group's elements; `random` are 16 bits as numbers.
template <Format kFormat, bool kStochastic>
KP_PRIMITIVE VecU codes_of(Vec values, float scale, float inverse, int32_t zero, [[maybe_unused]] Vec random) {
  const Vec magnitudes = cpu::abs(values), scales = cpu::broadcast(scale), inverses = cpu::broadcast(inverse);
  const VecU sign = cpu::bits_of(values) >> 31;
  if constexpr (is_integer(kFormat)) {
    const Vec quotients = kStochastic ? stochastic_quotients(values, scales, inverses, random)
                                      : nearest_quotients(values, scales, inverses);
    VecI codes = __builtin_convertvector(quotients, VecI) + zero;
    codes = codes < 0 ? VecI{} : codes;
    codes = codes > last_code(kFormat) ? cpu::broadcast(last_code(kFormat)) : codes;
    return reinterpret_cast<VecU>(scale > 0.0f ? codes : cpu::broadcast(zero));
  } else if constexpr (is_e2m1(kFormat)) {
    const VecU codes =
        kStochastic ? stochastic_e2m1_codes(magnitudes, scales, random) : nearest_e2m1_codes(magnitudes, scales);
    return sign << 3 | (scale > 0.0f ? codes : VecU{});
  } else {
    const Vec quotients = scale > 0.0f ? magnitudes * inverses : Vec{};  // of a power of two: nothing is rounded
    return sign << 7 |
           (kStochastic ? stochastic_e4m3_codes(quotients, random) : e4m3_codes(round_e4m3_lanes(quotients)));
  }
}

}  // namespace
}  // namespace kernel_pytorch::group_quantize::KP_ISA_NAMESPACE
