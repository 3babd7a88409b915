// The gradient of the routing: a warp per token computes its scores again. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/moe_routing/cuda/row.cuh"

namespace kernel_pytorch::moe_routing {

template <class T, int kPer>
__global__ void __launch_bounds__(kGradientThreads) backward(const __grid_constant__ BackwardArguments arguments) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t token = (int64_t{blockIdx.x} * kGradientThreads + threadIdx.x) / 32;
  tile::follow_closely();
  if (token >= arguments.tokens) return;
  const float tokens = static_cast<float>(arguments.tokens);
  float logits[kPer], of_scores[kPer];
  load_logits<T>(arguments.logits, token * arguments.row_stride, arguments.experts, logits);
  Row<kPer> row;
  row.compute(logits, arguments.is_sigmoid);
#pragma unroll
  for (int i = 0; i < kPer; ++i) of_scores[i] = 0.0f;
  if (arguments.grad_aux_loss != nullptr) {
    const float factor = *arguments.grad_aux_loss * static_cast<float>(arguments.experts) / tokens /
                         (tokens * static_cast<float>(arguments.k));
    float mean = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (32 * i + lane < arguments.experts)
        of_scores[i] = factor * static_cast<float>(arguments.counts[32 * i + lane]);
      mean += of_scores[i] * row.scores[i];
    }
    if (arguments.is_sigmoid) {
      mean = tile::sum_lanes<32>(mean) / row.total;
#pragma unroll
      for (int i = 0; i < kPer; ++i) of_scores[i] = (of_scores[i] - mean) / row.total;
    }
  }
  if (arguments.grad_weights != nullptr) {
    int32_t expert = 0;
    float gradient = 0.0f, score = 0.0f;
    if (lane < arguments.k) {
      const int64_t pair = token * arguments.k + lane;
      expert = arguments.chosen[pair];
      if (arguments.row_of_token[pair] >= 0) gradient = arguments.grad_weights[pair];
      const float logit =
          tile::to_float(static_cast<const T*>(arguments.logits)[token * arguments.row_stride + expert]);
      score = arguments.is_sigmoid ? sigmoid_of(logit) : row.softmax_of(logit);
    }
    if (arguments.renormalize) {
      const float sum = tile::sum_lanes<32>(score) + kLeastSum;
      gradient = (gradient - tile::sum_lanes<32>(gradient * score) / sum) / sum;
    }
    gradient *= arguments.scale;
    for (int32_t j = 0; j < arguments.k; ++j) {
      const int32_t of = __shfl_sync(0xffffffffu, expert, j);
      const float value = __shfl_sync(0xffffffffu, gradient, j);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (32 * i + lane == of) of_scores[i] += value;
      }
    }
  }
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) product += of_scores[i] * row.scores[i];
  product = tile::sum_lanes<32>(product);
  const float of_lse = arguments.grad_z_loss == nullptr ? 0.0f : *arguments.grad_z_loss * 2.0f * row.lse / tokens;
  T* to = static_cast<T*>(arguments.grad_logits) + token * arguments.experts;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (32 * i + lane < arguments.experts) {
      const float score = row.scores[i];
      const float softmax = arguments.is_sigmoid ? row.softmax_of(logits[i]) : score;
      const float through =
          arguments.is_sigmoid ? of_scores[i] * score * (1.0f - score) : score * (of_scores[i] - product);
      to[32 * i + lane] = tile::from_float<T>(through + of_lse * softmax);
    }
  }
}

}  // namespace kernel_pytorch::moe_routing
