// What is rounded, named alike on the host and on the device: x itself, or something made of it (quantize.h).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::quantize {

enum class Source : uint8_t { kGiven, kNorm, kGate, kGateGradient };

// One compiled way of making it.
struct ProducerKind {
  Source source;
  pointwise::Kind kind;  // of gates
};

}  // namespace kernel_pytorch::quantize
