// Which of an element's numbers a random draw rounds (optimizer_step.h has the layout), and the rounding, for host and
// device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::optimizer_step {

enum class Draw : uint8_t { kParameter, kFirst, kSecond };

KP_SHARED_CODE constexpr uint64_t draw_block(uint64_t block, Draw draw) {
  return block + (draw == Draw::kParameter ? 0 : uint64_t{1} << (draw == Draw::kFirst ? 60 : 61));
}

// The bits of a float to those of a bfloat16, up with the probability that the lower half tells. An amsgrad maximum
// takes the second average as it was rounded. NaN stays NaN.
KP_SHARED_CODE constexpr uint16_t round_stochastically(uint32_t float_bits, uint32_t random16) {
  const bool is_nan = (float_bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>((is_nan ? float_bits | 0x400000u : float_bits + random16) >> 16);
}

}  // namespace kernel_pytorch::optimizer_step
