#include "kernel_pytorch/hip/float8_cuda.h"

#include <gtest/gtest.h>

#include <bit>

#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch::hip {
namespace {

// Every sign and exponent, with significands on both sides of every tie of a small float.
template <class Check>
void for_each_float(const Check& check) {
  for (uint32_t upper = 0; upper < 1u << 16; ++upper) {
    for (const uint32_t lower : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) check(upper << 16 | lower);
  }
}

template <class T>
void expect_hosts_rounding(uint32_t bits, uint32_t rounded) {
  const float value = std::bit_cast<float>(bits);
  if (value != value) {
    ASSERT_EQ(rounded & 0x7fu, 0x7fu) << std::hex << bits;
  } else {
    ASSERT_EQ(rounded, from_float<T>(value).bits) << std::hex << bits;
  }
}

TEST(HipFloat8, RoundsAsTheHostDoes) {
  for_each_float([](uint32_t bits) {
    expect_hosts_rounding<Float8E4M3>(bits, to_e4m3(bits));
    expect_hosts_rounding<Float8E5M2>(bits, to_e5m2(bits));
  });
}

template <class T>
void expect_hosts_value(uint8_t byte, uint32_t half) {
  const float wanted = to_float(T{byte}), value = to_float(Float16{static_cast<uint16_t>(half)});
  if (wanted != wanted) {
    EXPECT_NE(value, value) << int{byte};
  } else {
    EXPECT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(wanted)) << int{byte};
  }
}

TEST(HipFloat8, WidensEveryByte) {
  for (int byte = 0; byte < 256; ++byte) {
    expect_hosts_value<Float8E4M3>(static_cast<uint8_t>(byte), e4m3_to_f16(byte));
    expect_hosts_value<Float8E5M2>(static_cast<uint8_t>(byte), e5m2_to_f16(byte));
  }
}

}  // namespace
}  // namespace kernel_pytorch::hip
