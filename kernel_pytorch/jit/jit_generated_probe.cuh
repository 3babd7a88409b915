// A kernel whose arithmetic is written at run time: DeviceCode::generated defines generated::change(float). For tests.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/generated.cuh"

namespace kernel_pytorch::jit_probe {

__global__ void change_each(float* values, int32_t count) {
  const int32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = generated::change(values[i]);
}

}  // namespace kernel_pytorch::jit_probe
