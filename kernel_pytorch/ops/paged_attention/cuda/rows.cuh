// Paged attention without tensor cores, a block for each row: what the other kernel does not take (fp32, int8 caches,
// unusual sizes). The warps take keys in turns; lanes share out the columns.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/request.cuh"

namespace kernel_pytorch::paged_attention {

template <class T>
__device__ __forceinline__ float number_of(T element) {
  return tile::to_float<T>(element);
}
template <>
__device__ __forceinline__ float number_of<int8_t>(int8_t element) {
  return static_cast<float>(element);
}

template <class Element, class Cache, int kColumns>
__global__ void __launch_bounds__(kThreads) attend_rows(const __grid_constant__ AttendArguments arguments) {
  __shared__ float shared_values[kWarps][kColumns * 32];
  __shared__ float shared_largest[kWarps], shared_sums[kWarps];
  const int32_t token = static_cast<int32_t>(blockIdx.x) / arguments.heads,
                head = static_cast<int32_t>(blockIdx.x) % arguments.heads;
  const int32_t key_head = static_cast<int32_t>(divide(static_cast<uint32_t>(head), arguments.group_divider));
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t index = request_of_token(arguments, token);
  Request request{};
  KeyRange range{};
  if (index >= 0) {
    request = request_at(arguments, index);
    range = keys_seen(arguments, request, request.position(token - request.first_query));
  }
  const int32_t query = token - request.first_query, position = request.position(query);
  float own[kColumns], values[kColumns] = {};
  const Element* row = static_cast<const Element*>(arguments.query) + token * arguments.query_token_stride +
                       head * arguments.query_head_stride;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    own[i] = lane + 32 * i < arguments.size ? tile::to_float<Element>(row[lane + 32 * i]) : 0.0f;
  float largest = tile::minus_infinity(), sum = 0.0f;
  for (int32_t key = range.first + warp; key < range.last; key += kWarps) {
    const int32_t page = page_of(arguments, request, key), place = row_in_page(arguments, key);
    if (page < 0 || is_masked(arguments, request, query, key)) continue;
    const Cache* keys = static_cast<const Cache*>(arguments.key.data) + offset_in(arguments.key, page, place, key_head);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (lane + 32 * i < arguments.size) score = fmaf(own[i], number_of<Cache>(keys[lane + 32 * i]), score);
    }
    score = tile::sum_lanes<32>(score) * arguments.scale * scale_at(arguments.key, page, place, key_head);
    if (arguments.softcap > 0.0f) score = arguments.softcap * tanhf(score / arguments.softcap);
    if (arguments.alibi_slopes != nullptr) {
      score -= arguments.alibi_slopes[head] * fabsf(static_cast<float>(key - position));
    }
    score *= tile::kLog2E;
    const float larger = fmaxf(largest, score);
    if (larger == tile::minus_infinity()) continue;
    const float shrink = ptx::ex2_approx_ftz_f32(largest - larger), weight = ptx::ex2_approx_ftz_f32(score - larger);
    largest = larger;
    sum = sum * shrink + weight;
    const float scaled = weight * scale_at(arguments.value, page, place, key_head);
    const Cache* numbers =
        static_cast<const Cache*>(arguments.value.data) + offset_in(arguments.value, page, place, key_head);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float number = lane + 32 * i < arguments.value_size ? number_of<Cache>(numbers[lane + 32 * i]) : 0.0f;
      values[i] = fmaf(scaled, number, values[i] * shrink);
    }
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
  float lse = finish_row(arguments, head, all, total, factor);
  if (index < 0) lse = tile::minus_infinity();
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
