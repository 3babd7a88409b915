#include "tests/emulated_gpu/runtime/number_formats.h"

#include <cmath>
#include <limits>
#include <vector>

namespace emulated {
namespace {

// Sign, exponent and mantissa; `has_infinity`: the largest exponent is infinity and NaN, else only all ones are NaN.
std::vector<float> values_of(int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bits = 1 + exponent_bits + mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1, ones = (1 << mantissa_bits) - 1;
  std::vector<float> values;
  for (int word = 0; word < 1 << bits; ++word) {
    const int mantissa = word & ones, exponent = word >> mantissa_bits & top;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                                : std::ldexp(static_cast<float>(mantissa + ones + 1), exponent - bias - mantissa_bits);
    if (has_infinity && exponent == top) value = std::numeric_limits<float>::infinity();
    const bool is_nan = exponent == top && (has_infinity ? mantissa != 0 : mantissa == ones);
    if (is_nan) value = std::numeric_limits<float>::quiet_NaN();
    values.push_back(word >> (bits - 1) != 0 ? -value : value);
  }
  return values;
}

}  // namespace

const float* f16_values() {
  static const auto* values = new std::vector<float>(values_of(5, 10, true));
  return values->data();
}
const float* e4m3_values() {
  static const auto* values = new std::vector<float>(values_of(4, 3, false));
  return values->data();
}
const float* e5m2_values() {
  static const auto* values = new std::vector<float>(values_of(5, 2, true));
  return values->data();
}

}  // namespace emulated
