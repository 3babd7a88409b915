// The functions of the pointwise ops, named alike on the host and on the device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::pointwise {

enum class Kind : uint8_t {
  kGelu,         // x * (1 + erf(x / sqrt 2)) / 2
  kGeluTanh,     // x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
  kSilu,         // x * sigmoid(x)
  kRelu,         // max(x, 0)
  kReluSquared,  // max(x, 0)^2
  kSigmoid,      // 1 / (1 + e^-x)
  kTanh,
  kIdentity,
};
inline constexpr int kKindCount = 8;

// Functions that a gate may have: those of gated linear units, and the gate itself (a plain product: a layer's scale).
KP_SHARED_CODE constexpr bool is_gate(Kind kind) {
  return kind <= Kind::kRelu || kind == Kind::kSigmoid || kind == Kind::kIdentity;
}

}  // namespace kernel_pytorch::pointwise
