// The functions and their derivatives on doubles, as pointwise/reference.cpp has them.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::pointwise {

struct DoubleValues {
  double value;
  double derivative;
};

// Not inlined: every function is in it, and fp64 is not what a kernel is tuned for.
__device__ __noinline__ inline DoubleValues differentiate(Kind kind, double x) {
  constexpr double kRootHalf = 0.70710678118654752440, kDensity = 0.39894228040143267794;  // 1 / sqrt(2 pi)
  constexpr double kSlope = 0.79788456080286535588, kCube = 0.044715;                      // sqrt(2 / pi)
  const double sigmoid = 1.0 / (1.0 + exp(-x)), positive = x <= 0.0 ? 0.0 : x;
  switch (kind) {
    case Kind::kGelu: {
      const double below = 0.5 * erfc(-x * kRootHalf);
      return {x * below, below + x * kDensity * exp(-0.5 * x * x)};
    }
    case Kind::kGeluTanh: {
      const double t = tanh(kSlope * (x + kCube * x * x * x));
      return {0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kSlope * (1.0 + 3.0 * kCube * x * x)};
    }
    case Kind::kSilu:
      return {x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))};
    case Kind::kRelu:
      return {positive, x <= 0.0 ? 0.0 : 1.0};
    case Kind::kReluSquared:
      return {positive * positive, 2.0 * positive};
    case Kind::kSigmoid:
      return {sigmoid, sigmoid * (1.0 - sigmoid)};
    case Kind::kTanh: {
      const double t = tanh(x);
      return {t, 1.0 - t * t};
    }
    case Kind::kIdentity:
      break;
  }
  return {x, 1.0};
}

}  // namespace kernel_pytorch::pointwise
