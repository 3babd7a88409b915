// The forms of a product and its precisions, named alike on the host and on the device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::matmul {

enum class Form : uint8_t { kPlain, kGated, kGradient, kGatedGradient, kGatedTwice };
enum class Precision : uint8_t { kFull, kTf32, kBf16, kBf16x3 };

}  // namespace kernel_pytorch::matmul
