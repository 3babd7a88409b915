// exp, log, tanh, erf, sigmoid on float lanes, without branches or tables. Polynomials are minimax fits of ours,
// rounded to float one coefficient after the other. NaN gives NaN. Where the true result is denormal, exp and sigmoid
// give zero: denormal results cost tens of cycles, and what kernels do with them is add them to something. The largest
// error over every float, in units of the last place, with FMA and without, is exp 1.02, log 0.9, tanh 1.34, erf 1.14,
// sigmoid 2.49.
#pragma once

#include "kernel_pytorch/cpu/vec.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// Horner's rule, the highest coefficient first.
template <class... Coefficients>
KP_PRIMITIVE Vec polynomial(Vec x, float highest, Coefficients... rest) {
  Vec sum = broadcast(highest);
  ((sum = sum * x + rest), ...);
  return sum;
}

KP_PRIMITIVE Vec copy_sign(Vec magnitude, Vec sign) {
  return from_bits((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

// value * 2^power, for whole powers in [-252, 254] (as float lanes and as integer lanes).
KP_PRIMITIVE Vec scale_by_power(Vec value, [[maybe_unused]] Vec power, [[maybe_unused]] VecI power_integer) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(value), reinterpret_cast<__m512>(power)));
#else
  // In two steps, since 2^128 has no float but 1.9 * 2^127 does.
  const VecI half = power_integer >> 1;
  const Vec first = reinterpret_cast<Vec>((half + 127) << 23);
  const Vec second = reinterpret_cast<Vec>((power_integer - half + 127) << 23);
  return value * first * second;
#endif
}

// 1 / x for |x| in [2^-125, 2^125] or infinite. Where a division takes four times as long as an estimate and one Newton
// step, it is those.
KP_PRIMITIVE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec estimate = reinterpret_cast<Vec>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(x)));
  const Vec error = 1.0f - x * estimate;
  return select(estimate == 0.0f, estimate, estimate * error + estimate);  // infinity * 0 is no error to correct
#else
  return 1.0f / x;
#endif
}

KP_PRIMITIVE Vec exp(Vec x) {
  constexpr float kLeast = -87.3365402f;  // e^x is denormal below
  constexpr float kMost = 88.8f;          // and infinite from 88.7229 on
  // In this order of arguments min and max hand a NaN on.
  const Vec clamped = max(broadcast(kLeast), min(broadcast(kMost), x));
  // x = power * ln 2 + rest; adding 1.5 * 2^23 rounds to a whole number, readable as float and as integer.
  constexpr float kRounder = 12582912.0f;
  const Vec rounded = clamped * 1.44269504f + kRounder;
  const Vec power = rounded - kRounder;
  const VecI power_integer = reinterpret_cast<VecI>(rounded) - 0x4b400000;
  // ln 2 in two parts; the first has so few bits that the product is exact, with FMA or without.
  const Vec rest = (clamped - power * 0.693359375f) + power * 2.12194440e-4f;
  const Vec tail = polynomial(rest, 0.00138210552f, 0.00836867467f, 0.0416682623f, 0.166665211f, 0.49999994f);
  const Vec fraction = (rest * rest) * tail + rest + 1.0f;
  return select(x < kLeast, Vec{}, scale_by_power(fraction, power, power_integer));
}

// e^x of an argument in units of its own: the caller has multiplied it by kExpUnit, which is log2(e) where 2^x is the
// shorter way and costs nothing if another factor is applied anyway. For sums and shares of exponentials: zero where
// the result would be denormal; within 3e-7 of the value from -1 to 1 and 5e-6 at the ends, or for results that are
// rounded to kBits significant bits (8: bf16, 11: fp16) within 2^-13.7 and 2^-18.5.
#if defined(__AVX512DQ__)
constexpr float kExpUnit = 1.44269504f;
#else
constexpr float kExpUnit = 1.0f;
#endif
template <int kBits = 24>
KP_PRIMITIVE Vec exp_of_units(Vec x) {
#if defined(__AVX512DQ__)
  const __m512 lanes = reinterpret_cast<__m512>(x);
  // Lanes below, down to -inf, compute nonsense and come out as zero; NaN is not less.
  const __mmask16 is_normal = _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  constexpr int kDownToInteger = 0x09;  // x - floor(x), without exceptions
  const Vec rest = reinterpret_cast<Vec>(_mm512_maskz_reduce_ps(0xffff, lanes, kDownToInteger));
  Vec power;
  if constexpr (kBits == 8) {
    power = polynomial(rest, 0.0780245215f, 0.226067171f, 0.695833504f, 0.999925196f);
  } else if constexpr (kBits == 11) {
    power = polynomial(rest, 0.0135341678f, 0.0520114638f, 0.241442755f, 0.693003833f, 1.00000262f);
  } else {
    power = polynomial(rest, 0.001877576658f, 0.008989340131f, 0.05582631802f, 0.2401536171f, 0.6931530732f, 1.0f);
  }
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(is_normal, reinterpret_cast<__m512>(power), lanes));
#else
  return exp(x);
#endif
}
KP_PRIMITIVE Vec exp_fast(Vec x) {
  return exp_of_units(x * kExpUnit);
}

// 2^x for shares of a sum of powers, within 1.5e-7 of the value; zero where the result would be denormal, so also for
// -inf.
KP_PRIMITIVE Vec exp2_fast(Vec x) {
#if defined(__AVX512DQ__)
  const __m512 lanes = reinterpret_cast<__m512>(x);
  const __mmask16 is_normal = _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  constexpr int kDownToInteger = 0x09;
  const Vec fraction = reinterpret_cast<Vec>(_mm512_maskz_reduce_ps(0xffff, lanes, kDownToInteger));
  const Vec power = polynomial(fraction, 0.000216815461f, 0.00124540622f, 0.0096761724f, 0.0554853678f, 0.240229174f,
                               0.693147063f, 1.0f);
  return reinterpret_cast<Vec>(_mm512_maskz_scalef_ps(is_normal, reinterpret_cast<__m512>(power), lanes));
#else
  const Vec clamped = max(broadcast(-126.0f), min(broadcast(129.0f), x));  // hands a NaN on
  constexpr float kRounder = 12582912.0f;
  const Vec rounded = clamped + kRounder;
  const Vec power = rounded - kRounder;
  const VecI power_integer = reinterpret_cast<VecI>(rounded) - 0x4b400000;
  const Vec fraction = polynomial(clamped - power, 0.0001534581189f, 0.001339993122f, 0.009618488958f, 0.05550328777f,
                                  0.2402264689f, 0.6931472057f, 1.0f);
  return select(x < -126.0f, Vec{}, scale_by_power(fraction, power, power_integer));
#endif
}

KP_PRIMITIVE Vec log(Vec x) {
  constexpr float kLeastNormal = 1.17549435e-38f;
  constexpr uint32_t kSqrtHalfBits = 0x3f3504f3;
  const VecI is_denormal = x < kLeastNormal;
  const VecU bits = bits_of(select(is_denormal, x * 8388608.0f, x));
  // x = 2^power * mantissa with the mantissa in [sqrt(1/2), sqrt(2)).
  const VecU moved = bits - kSqrtHalfBits;
  const Vec mantissa = from_bits((moved & 0x7fffffu) + kSqrtHalfBits);
  const VecI power_integer = (reinterpret_cast<VecI>(moved) >> 23) - (is_denormal & 23);
  const Vec power = __builtin_convertvector(power_integer, Vec);
  const Vec f = mantissa - 1.0f;
  const Vec square = f * f;
  const Vec tail = polynomial(f, 0.0674955621f, -0.116701923f, 0.118834704f, -0.124062076f, 0.142203629f, -0.166679904f,
                              0.200020716f, -0.250000089f, 0.333333135f);
  Vec result = f * square * tail - power * 2.12194440e-4f;
  result = (result - 0.5f * square) + f;
  result = result + power * 0.693359375f;
  const Vec infinity = broadcast(__builtin_inff());
  result = select(x == infinity, infinity, result);
  result = select(x == 0.0f, -infinity, result);
  return select(x >= 0.0f, result, broadcast(__builtin_nanf("")));  // negative or NaN
}

// 2 / (e + 1) for finite e >= 1. One Newton step puts right what the estimate misses and what the sum rounded. Without
// FMA the step's own rounding would be as large, and a division is exact enough.
KP_PRIMITIVE Vec two_over_one_more(Vec e) {
  const Vec sum = e + 1.0f;
#if defined(__FMA__)
#if defined(__AVX512F__)
  const Vec estimate = reinterpret_cast<Vec>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(sum)));
#else
  const Vec estimate = 1.0f / sum;
#endif
  const Vec twice = estimate + estimate, lost = e - (sum - 1.0f);
  const Vec error = (2.0f - twice * sum) - twice * lost;
  return error * estimate + twice;
#else
  return 2.0f / sum;
#endif
}

KP_PRIMITIVE Vec tanh(Vec x) {
  const Vec magnitude = min(broadcast(10.0f), abs(x));  // tanh(10) rounds to 1; in this order a NaN is handed on
  const Vec square = x * x;
  const Vec tail = polynomial(square, -0.00569625339f, 0.0206308626f, -0.0537370592f, 0.133314088f, -0.333332807f);
  const Vec small = x * square * tail + x;
  const Vec large = 1.0f - two_over_one_more(exp(magnitude + magnitude));
  return copy_sign(select(magnitude < 0.625f, small, large), x);  // also where `small` loses the sign of -0
}

KP_PRIMITIVE Vec erf(Vec x) {
  const Vec magnitude = min(broadcast(4.0f), abs(x));  // erf(4) rounds to 1
  const Vec square = x * x;
  const Vec inner = polynomial(square, 8.00027919e-05f, -0.000805038435f, 0.00519243814f, -0.026855737f, 0.112836257f,
                               -0.376126289f, 0.128379166f);
  const Vec small = x * inner + x;
  // erfc(t) = e^-(t + t q(t))
  const Vec outer = polynomial(magnitude, 1.04290157e-05f, -0.000314827834f, 0.0036102545f, -0.0236944426f,
                               0.106158964f, 0.635198057f, 0.128637075f);
  const Vec large = 1.0f - exp(-(magnitude * outer + magnitude));
  return select(magnitude < 0.9375f, small, copy_sign(large, x));
}

KP_PRIMITIVE Vec sigmoid(Vec x) {
  return reciprocal(1.0f + exp(-x));
}

// For results that are rounded to kBits significant bits (8: bf16, 11: fp16): a few uops instead of a dozen, where rows
// of narrow types are bound by them and not by memory. Relative errors are below 2^-13.7 and 2^-18.5.
template <int kBits>
KP_PRIMITIVE Vec exp2_rough(Vec x) {
  static_assert(kBits == 8 || kBits == 11);
  const auto fraction = [](Vec rest) {  // 2^rest on [0, 1)
    if constexpr (kBits == 8) return polynomial(rest, 0.0780245215f, 0.226067171f, 0.695833504f, 0.999925196f);
    if constexpr (kBits == 11) {
      return polynomial(rest, 0.0135341678f, 0.0520114638f, 0.241442755f, 0.693003833f, 1.00000262f);
    }
  };
  const Vec clamped = max(broadcast(-126.0f), x);  // also keeps results normal: denormal ones are slow
#if defined(__AVX512F__)
  constexpr int kFloor = 0x09;
  const Vec rest = reinterpret_cast<Vec>(_mm512_maskz_reduce_ps(0xffff, reinterpret_cast<__m512>(clamped), kFloor));
  return scale_by_power(fraction(rest), clamped, VecI{});  // which takes the floor itself
#else
  constexpr float kRounder = 12582912.0f;
  const Vec bounded = min(broadcast(127.0f), clamped);
  const Vec rounded = (bounded - 0.5f) + kRounder;
  const VecU power = bits_of(rounded) - 0x4b400000u;
  const Vec result = from_bits(bits_of(fraction(bounded - (rounded - kRounder))) + (power << 23));
  return select(is_nan(x), x, result);
#endif
}

// Relative errors are below 2^-12.8 and 2^-17.2 (the argument times log2(e) is rounded).
template <int kBits>
KP_PRIMITIVE Vec sigmoid_rough(Vec x) {
  const Vec sum = 1.0f + exp2_rough<kBits>(x * -1.44269504f);
#if defined(__AVX512F__)
  if constexpr (kBits == 8) return reinterpret_cast<Vec>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(sum)));
#endif
  return reciprocal(sum);
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
