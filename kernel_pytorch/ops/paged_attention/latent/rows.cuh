// Attention over latent rows without tensor cores, a block for each row: fp32 and other sizes. The warps take keys in
// turns; lanes share out the columns.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/request.cuh"

namespace kernel_pytorch::paged_attention {

// arguments: key is the latent cache, value the rope cache, size the columns of both.
template <class Element, class Cache>
__global__ void __launch_bounds__(kThreads, 1) attend_latent_rows(const __grid_constant__ AttendArguments arguments) {
  constexpr int kColumns = 20;  // of a lane
  __shared__ float shared_values[kWarps][kColumns * 32];
  __shared__ float shared_largest[kWarps], shared_sums[kWarps];
  const int32_t token = static_cast<int32_t>(blockIdx.x) / arguments.heads,
                head = static_cast<int32_t>(blockIdx.x) % arguments.heads;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t index = request_of_token(arguments, token);
  Request request{};
  KeyRange range{};
  if (index >= 0) {
    request = request_at(arguments, index);
    range = keys_seen(arguments, request, request.position(token - request.first_query));
  }
  float own[kColumns], values[kColumns] = {};
  const Element* row = static_cast<const Element*>(arguments.query) + token * arguments.query_token_stride +
                       head * arguments.query_head_stride;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    own[i] = lane + 32 * i < arguments.size ? tile::to_float<Element>(row[lane + 32 * i]) : 0.0f;
  }
  float largest = tile::minus_infinity(), sum = 0.0f;
  for (int32_t key = range.first + warp; key < range.last; key += kWarps) {
    const int32_t page = page_of(arguments, request, key), place = row_in_page(arguments, key);
    if (page < 0) continue;
    const Cache* latent = static_cast<const Cache*>(arguments.key.data) + offset_in(arguments.key, page, place, 0);
    const Element* rope =
        static_cast<const Element*>(arguments.value.data) + offset_in(arguments.value, page, place, 0);
    float numbers[kColumns], score = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int32_t column = lane + 32 * i;
      numbers[i] = 0.0f;
      if (column < arguments.value_size) {
        numbers[i] = tile::to_float<Cache>(latent[column]);
        if constexpr (sizeof(Cache) == 1) numbers[i] *= scale_at(arguments.key, page, place, column / 128);
      } else if (column < arguments.size) {
        numbers[i] = tile::to_float<Element>(rope[column - arguments.value_size]);
      }
      score = fmaf(own[i], numbers[i], score);
    }
    score = tile::sum_lanes<32>(score) * arguments.scale * tile::kLog2E;
    const float larger = fmaxf(largest, score);
    if (larger == tile::minus_infinity()) continue;
    const float shrink = ptx::ex2_approx_ftz_f32(largest - larger), weight = ptx::ex2_approx_ftz_f32(score - larger);
    largest = larger;
    sum = sum * shrink + weight;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = fmaf(weight, numbers[i], values[i] * shrink);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) shared_values[warp][lane + 32 * i] = values[i];
  if (lane == 0) {
    shared_largest[warp] = largest;
    shared_sums[warp] = sum;
  }
  __syncthreads();
  float weights[kWarps], all = tile::minus_infinity(), total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) all = fmaxf(all, shared_largest[i]);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    weights[i] = all == tile::minus_infinity() ? 0.0f : ptx::ex2_approx_ftz_f32(shared_largest[i] - all);
    total += weights[i] * shared_sums[i];
  }
  float factor;
  const float lse = finish_row(arguments, head, all, total, factor);
  Element* output = static_cast<Element*>(arguments.output) + token * arguments.output_token_stride +
                    head * arguments.output_head_stride;
  for (int32_t column = static_cast<int32_t>(threadIdx.x); column < arguments.value_size; column += kThreads) {
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) value += weights[i] * shared_values[i][column];
    output[column] = tile::from_float<Element>(value * factor);
  }
  if (threadIdx.x == 0 && arguments.lse != nullptr) arguments.lse[head * arguments.tokens + token] = lse;
}

}  // namespace kernel_pytorch::paged_attention
