// The small formats against their definition: a table of every value, and the nearest entry of it (ties to the even
// one) found by search in double. Nothing of the bit arithmetic under test is used to build the table.
#include "kernel_pytorch/base/float_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace kernel_pytorch {
namespace {

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  uint32_t largest;  // bits of the largest finite value
  bool saturates;
};
constexpr Format kBFloat16{"bf16", 8, 7, 0x7f7f, false};
constexpr Format kFloat16{"fp16", 5, 10, 0x7bff, false};
constexpr Format kE4M3{"e4m3", 4, 3, 0x7e, true};
constexpr Format kE5M2{"e5m2", 5, 2, 0x7b, true};

// Positive finite values in order: the index is the bit pattern.
std::vector<double> positive_values(const Format& format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  std::vector<double> values;
  for (uint32_t bits = 0; bits <= format.largest; ++bits) {
    const int exponent = static_cast<int>(bits >> format.mantissa_bits);
    const double mantissa = bits & ((1u << format.mantissa_bits) - 1);
    const double leading = exponent == 0 ? 0 : std::ldexp(1.0, format.mantissa_bits);
    values.push_back(std::ldexp(leading + mantissa, std::max(exponent, 1) - bias - format.mantissa_bits));
  }
  return values;
}

uint32_t nearest(const std::vector<double>& values, const Format& format, double magnitude) {
  const uint32_t overflow = format.saturates ? format.largest : format.largest + 1;  // the next pattern is infinity
  const double last_gap = values.back() - values[values.size() - 2];
  if (magnitude >= values.back() + last_gap / 2) return overflow;  // a tie goes up: the largest is odd
  const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
  if (above == values.end()) return format.largest;
  const auto index = static_cast<uint32_t>(above - values.begin());
  if (*above == magnitude || index == 0) return index;
  const double up = *above - magnitude, down = magnitude - values[index - 1];
  return up < down || (up == down && index % 2 == 0) ? index : index - 1;
}

template <class T>
void check_format(const Format& format) {
  constexpr int kBits = 8 * sizeof(T);
  const std::vector<double> values = positive_values(format);
  const uint32_t sign_bit = 1u << (kBits - 1);
  for (uint32_t bits = 0; bits <= format.largest; ++bits) {
    for (uint32_t sign : {0u, sign_bit}) {
      const T stored{static_cast<decltype(T::bits)>(bits | sign)};
      const float value = to_float(stored);
      ASSERT_EQ(value, sign ? -values[bits] : values[bits]) << format.name << " " << bits;
      ASSERT_EQ(std::signbit(value), sign != 0);
      ASSERT_EQ(from_float<T>(value).bits, stored.bits) << format.name << " " << bits;
    }
  }
  std::mt19937 generator(3);
  const auto check = [&](float value) {
    const uint32_t wanted = nearest(values, format, std::abs(static_cast<double>(value)));
    ASSERT_EQ(from_float<T>(value).bits, wanted | (std::signbit(value) ? sign_bit : 0))
        << format.name << " of " << value;
  };
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const auto middle = static_cast<float>((values[i] + values[i + 1]) / 2);
    for (float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
      check(value);
      check(-value);
    }
  }
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(generator()));
    if (std::isfinite(value)) check(value);
  }
  for (float value : {0.0f, -0.0f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(), 448.0f,
                      464.0f, 465.0f, 57344.0f, 61440.0f, 65504.0f, 65519.99f, 65520.0f}) {
    check(value);
  }
}

TEST(FloatTypes, BFloat16) {
  check_format<BFloat16>(kBFloat16);
}
TEST(FloatTypes, Float16) {
  check_format<Float16>(kFloat16);
}
TEST(FloatTypes, Float8E4M3) {
  check_format<Float8E4M3>(kE4M3);
}
TEST(FloatTypes, Float8E5M2) {
  check_format<Float8E5M2>(kE5M2);
}

TEST(FloatTypes, InfinityStaysWhereTheFormatHasOneAndSaturatesInFp8) {
  EXPECT_EQ(from_float<BFloat16>(INFINITY).bits, 0x7f80);
  EXPECT_EQ(from_float<Float16>(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(from_float<Float8E4M3>(INFINITY).bits, 0x7e);
  EXPECT_EQ(from_float<Float8E5M2>(-INFINITY).bits, 0xfb);
  EXPECT_EQ(to_float(BFloat16{0xff80}), -INFINITY);
  EXPECT_EQ(to_float(Float16{0x7c00}), INFINITY);
  EXPECT_EQ(to_float(Float8E5M2{0x7c}), INFINITY);
}

template <class T>
void check_nan_round_trip() {
  for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0x7fffffffu, 0xffc12345u}) {
    const float nan = std::bit_cast<float>(bits);
    const float back = to_float(from_float<T>(nan));
    EXPECT_TRUE(std::isnan(back));
    EXPECT_EQ(std::bit_cast<uint32_t>(back) >> 31, bits >> 31);
    EXPECT_NE(std::bit_cast<uint32_t>(back) & 0x400000u, 0u) << "a signalling NaN must not come out";
  }
}

TEST(FloatTypes, NanStaysNanKeepsItsSignAndIsQuiet) {
  check_nan_round_trip<BFloat16>();
  check_nan_round_trip<Float16>();
  check_nan_round_trip<Float8E4M3>();
  check_nan_round_trip<Float8E5M2>();
  for (uint32_t bits = 0x7c01; bits <= 0x7fff; ++bits) {
    ASSERT_TRUE(std::isnan(to_float(Float16{static_cast<uint16_t>(bits)})));
  }
}

static_assert(from_float<BFloat16>(1.0f).bits == 0x3f80 && to_float(Float16{0x3c00}) == 1.0f, "usable in constants");

}  // namespace
}  // namespace kernel_pytorch
