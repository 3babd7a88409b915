// A kernel around generated functions, for the tests that compile and run them. As attention's kernels use them: the
// changed score where the mask keeps it, and gradients by atomic adds.
#pragma once

#include "kernel_pytorch/cuda/tile/captures_cuda.h"
#include "kernel_pytorch/generated.cuh"

namespace kernel_pytorch::expression_probe {

struct CapturedTensors {
  tile::CapturedTensor list[8];
};

template <bool kGradient>
__global__ void apply(float* scores, float* grad, int32_t columns, int32_t batch, int32_t head,
                      const __grid_constant__ CapturedTensors captured) {
  const int32_t query = blockIdx.x, key = threadIdx.x;
  float& score = scores[query * columns + key];
  if constexpr (kGradient) {
    float& slot = grad[query * columns + key];
    slot = generated::score_mod_gradient(score, batch, head, query, key, captured.list, slot,
                                         [&](auto load, int64_t offset, float value) {
                                           atomicAdd(captured.list[load.kCapture].gradient + offset, value);
                                         });
  } else {
    const bool is_kept = generated::mask_mod(score, batch, head, query, key, captured.list);
    score = is_kept ? generated::score_mod(score, batch, head, query, key, captured.list) : -1e30f;
  }
}

}  // namespace kernel_pytorch::expression_probe
