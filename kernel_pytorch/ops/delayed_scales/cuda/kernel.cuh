// Delayed scales: a thread has one number of a step, moves its history and takes the largest on the way. sm_80.
#pragma once

#include "kernel_pytorch/ops/delayed_scales/cuda/arguments_cuda.h"

namespace kernel_pytorch::delayed_scales {

__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ Arguments arguments) {
  const int32_t index = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= arguments.count) return;
  const int32_t layer = index / arguments.elements, element = index % arguments.elements;
  float* amax = arguments.amax[layer] + element;
  const int64_t place = arguments.first + index;
  float* history = arguments.histories + place;
  float peak = 0.0f;
  for (int32_t step = 0; step + 1 < arguments.steps; ++step) {
    const float value = history[(step + 1) * arguments.all];
    history[step * arguments.all] = value;
    peak = peak > value ? peak : value;
  }
  const float seen = arguments.joined != nullptr ? arguments.joined[place] : *amax;
  history[(arguments.steps - 1) * arguments.all] = seen;
  peak = peak > seen ? peak : seen;
  const float scale = peak * arguments.factors[place];
  const float clamped = scale < arguments.least ? arguments.least : scale > arguments.most ? arguments.most : scale;
  arguments.scales[layer][element] = peak > 0.0f ? clamped : 1.0f;
  *amax = 0.0f;
}

}  // namespace kernel_pytorch::delayed_scales
