// New keys and values into their slots, keys turned on the way: a warp for each row of a head.
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

template <class Element>
__device__ __forceinline__ float table_at(const RotationArguments& rotation, const void* table, int64_t place) {
  if (rotation.is_float) return static_cast<const float*>(table)[place];
  return tile::to_float<Element>(static_cast<const Element*>(table)[place]);
}

// Column `column` of a key after its rotation; the bits are the reference's.
template <class Element>
__device__ __forceinline__ float turned(const RotationArguments& rotation, const Element* row, int64_t position,
                                        int32_t column) {
  const int32_t pair = rotation.interleaved ? column / 2 : column % rotation.pairs;
  const bool is_second = rotation.interleaved ? column % 2 != 0 : column >= rotation.pairs;
  const int32_t other = rotation.interleaved ? column ^ 1 : is_second ? pair : pair + rotation.pairs;
  if (position < 0 || position >= rotation.rows) return __int_as_float(0x7fc00000);
  const float cosine =
      table_at<Element>(rotation, rotation.cos, position * rotation.cos_stride + int64_t{pair} * rotation.cos_step);
  const float sine =
      table_at<Element>(rotation, rotation.sin, position * rotation.sin_stride + int64_t{pair} * rotation.sin_step);
  const float own = tile::to_float<Element>(row[column]), others = tile::to_float<Element>(row[other]);
  const float product = __fmul_rn(others, sine);
  return __fmaf_rn(own, cosine, is_second ? product : -product);
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
  const RotationArguments& rotation = arguments.rotation;
  const int32_t turned_columns = is_value || rotation.cos == nullptr ? 0 : 2 * rotation.pairs;
  int64_t position = token;
  if (turned_columns > 0 && rotation.positions != nullptr) {
    position = index_at(rotation.positions, rotation.positions_are_wide, token);
  }
  for (int32_t column = static_cast<int32_t>(threadIdx.x % 32); column < rows.size; column += 32) {
    const float value = column < turned_columns ? turned<Element>(rotation, from, position, column)
                                                : tile::to_float<Element>(from[column]);
    to[column] = code_of<Cache>(value, scale);
  }
}

}  // namespace kernel_pytorch::paged_attention
