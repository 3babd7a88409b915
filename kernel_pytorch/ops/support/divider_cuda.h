// Division of 32-bit numbers by one that the host knows: a product and a shift. For values below 2^31.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

struct Divider {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
};

// The quotient of any value below 2^31 is exact: with 2^(bits - 1) < divisor <= 2^bits and the multiplier
// 2^(31 + bits) / divisor rounded up, the error stays below one part in 2^31.
KP_SHARED_CODE constexpr Divider make_divider(uint32_t divisor) {
  uint32_t bits = 0;
  while (bits < 31 && uint64_t{1} << bits < divisor) ++bits;
  const uint32_t shift = 31 + bits;
  return {divisor, static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor), shift};
}

KP_SHARED_CODE constexpr uint32_t divide(uint32_t value, const Divider& by) {
  return static_cast<uint32_t>(static_cast<uint64_t>(value) * by.multiplier >> by.shift);
}

}  // namespace kernel_pytorch
