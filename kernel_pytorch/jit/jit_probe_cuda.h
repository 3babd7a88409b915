// The Config of the probe kernels, shared by host and device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::jit_probe {

struct ProbeConfig {
  int32_t threads;
  int32_t addend;
};

constexpr int32_t doubled(int32_t value) {
  return 2 * value;
}

}  // namespace kernel_pytorch::jit_probe
