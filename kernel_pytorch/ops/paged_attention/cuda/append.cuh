// New keys and values into their slots: a warp for each row of a head.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::paged_attention {

template <class Cache>
__device__ __forceinline__ Cache code_of(float value, float scale) {
  return tile::from_float<Cache>(sizeof(Cache) == 1 ? __fdiv_rn(value, scale) : value);
}
template <>
__device__ __forceinline__ int8_t code_of<int8_t>(float value, float scale) {
  const float quotient = __fdiv_rn(value, scale);
  return quotient == quotient ? static_cast<int8_t>(fminf(fmaxf(rintf(quotient), -128.0f), 127.0f)) : int8_t{0};
}

template <class Element, class Cache>
__global__ void __launch_bounds__(kThreads) append(const __grid_constant__ AppendArguments arguments) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const bool is_value = index % 2 != 0;
  const int64_t token = index / 2 / arguments.key_heads, head = index / 2 % arguments.key_heads;
  if (token >= arguments.tokens) return;
  const int64_t slot = index_at(arguments.slots, arguments.slots_are_wide, token);
  if (slot < 0 || slot >= arguments.slot_count) return;
  const int64_t page = slot / arguments.page_size, row = slot % arguments.page_size;
  const CacheArguments& cache = is_value ? arguments.value : arguments.key;
  const RowsArguments& rows = is_value ? arguments.new_value : arguments.new_key;
  float scale = 1.0f;
  if (cache.scales != nullptr) {
    scale =
        cache.scales[page * cache.scale_page_stride + row * cache.scale_row_stride + head * cache.scale_head_stride];
  }
  const Element* from = static_cast<const Element*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
  Cache* to = const_cast<Cache*>(static_cast<const Cache*>(cache.data)) + page * cache.page_stride +
              row * cache.row_stride + head * cache.head_stride;
  for (int32_t column = static_cast<int32_t>(threadIdx.x % 32); column < rows.size; column += 32) {
    to[column] = code_of<Cache>(tile::to_float<Element>(from[column]), scale);
  }
}

}  // namespace kernel_pytorch::paged_attention
