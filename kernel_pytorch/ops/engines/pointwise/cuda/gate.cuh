// A gated value's derivatives, for kernels that go backward through it.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"

namespace kernel_pytorch::pointwise {

// What bounds clamped gates, and the slope of their sigmoid; a limit of 0 bounds nothing.
struct GateLimits {
  float limit, slope;
};

// The gated value, and with its gradient those of gate and up, in their places. Without a gate up is not read.
template <Kind kKind, bool kAccurate>
__device__ __forceinline__ float differentiate_gate(GateLimits limits, bool is_gated, float gradient, float& gate,
                                                    float& up) {
  if (limits.limit > 0.0f) {
    const float limit = limits.limit, g = fminf(gate, limit), factor = fminf(fmaxf(up, -limit), limit) + 1.0f;
    const float s = sigmoid<kAccurate>(limits.slope * g);
    gate = gate <= limit ? gradient * factor * (s + limits.slope * g * s * (1.0f - s)) : 0.0f;
    up = fabsf(up) <= limit ? gradient * g * s : 0.0f;
    return g * s * factor;
  }
  const Values at = differentiate<kKind, kAccurate>(gate);
  const float factor = is_gated ? up : 1.0f;
  gate = gradient * factor * at.derivative;
  up = gradient * at.value;
  return at.value * factor;
}

}  // namespace kernel_pytorch::pointwise
