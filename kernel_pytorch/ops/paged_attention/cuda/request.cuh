// What a request is on the device, and which keys its queries see.
#pragma once

#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::paged_attention {

struct Request {
  int32_t index, first_query, queries, keys;

  __device__ __forceinline__ int32_t position(int32_t query) const { return keys - queries + query; }
};

__device__ __forceinline__ Request request_at(const AttendArguments& arguments, int32_t index) {
  Request request{index, index * arguments.queries_each, arguments.queries_each, 0};
  if (arguments.cu_seqlens_q != nullptr) {
    request.first_query = arguments.cu_seqlens_q[index];
    request.queries = arguments.cu_seqlens_q[index + 1] - request.first_query;
    request.queries = max(0, min(request.queries, arguments.tokens - request.first_query));
  }
  request.keys = arguments.table * arguments.page_size;
  if (arguments.seq_lens != nullptr) request.keys = max(0, min(arguments.seq_lens[index], request.keys));
  return request;
}

struct Row {
  int32_t query, head;
};

struct KeyRange {
  int32_t first, last;
};
__device__ __forceinline__ KeyRange keys_seen(const AttendArguments& arguments, const Request& request,
                                              int32_t position) {
  const int32_t right = arguments.causal ? 0 : arguments.window_right;
  const int32_t last = max(0, min(request.keys, position + 1 + min(right, arguments.window_right)));
  return {min(last, max(0, position - arguments.window_left)), last};
}

__device__ __forceinline__ bool is_masked(const AttendArguments& arguments, const Request& request, int32_t query,
                                          int32_t key) {
  const int32_t new_key = key - (request.keys - request.queries);
  if (arguments.mask == nullptr || new_key < 0) return false;
  return arguments.mask[request.index * arguments.mask_request_stride + query * arguments.mask_query_stride +
                        new_key * arguments.mask_key_stride] == 0;
}

// The page of a key that the request has, or -1.
__device__ __forceinline__ int32_t page_of(const AttendArguments& arguments, const Request& request, int32_t key) {
  const int64_t place = static_cast<int64_t>(request.index) * arguments.table +
                        divide(static_cast<uint32_t>(key), arguments.page_divider);
  const int32_t page = arguments.block_tables[place];
  return page < arguments.pages ? page : -1;
}
__device__ __forceinline__ int32_t row_in_page(const AttendArguments& arguments, int32_t key) {
  return key - static_cast<int32_t>(divide(static_cast<uint32_t>(key), arguments.page_divider)) * arguments.page_size;
}
__device__ __forceinline__ int64_t offset_in(const CacheArguments& cache, int32_t page, int32_t row, int32_t head) {
  return page * cache.page_stride + row * cache.row_stride + head * cache.head_stride;
}
__device__ __forceinline__ float scale_at(const CacheArguments& cache, int32_t page, int32_t row, int32_t head) {
  if (cache.scales == nullptr) return 1.0f;
  return cache.scales[page * cache.scale_page_stride + row * cache.scale_row_stride + head * cache.scale_head_stride];
}

// From a row's largest score and sum, both to base 2, to its lse (natural) and what its values are multiplied with.
__device__ __forceinline__ float finish_row(const AttendArguments& arguments, int32_t head, float largest, float sum,
                                            float& factor) {
  if (arguments.sinks != nullptr) {
    const float sink = arguments.sinks[head] * tile::kLog2E;
    const float larger = fmaxf(largest, sink);
    if (larger == tile::minus_infinity()) {
      factor = 0.0f;
      return larger;
    }
    const float shrink = ptx::ex2_approx_ftz_f32(largest - larger);
    sum = sum * shrink + ptx::ex2_approx_ftz_f32(sink - larger);
    factor = shrink / sum;
    return (larger + ptx::lg2_approx_ftz_f32(sum)) / tile::kLog2E;
  }
  const bool is_empty = largest == tile::minus_infinity();
  factor = is_empty ? 0.0f : 1.0f / sum;
  return is_empty ? largest : (largest + ptx::lg2_approx_ftz_f32(sum)) / tile::kLog2E;
}

// Where a token's request begins: the last one whose offset is not beyond it, or -1 past the last.
__device__ __forceinline__ int32_t request_of_token(const AttendArguments& arguments, int32_t token) {
  if (arguments.cu_seqlens_q == nullptr) return token / max(arguments.queries_each, 1);
  if (token >= arguments.cu_seqlens_q[arguments.requests]) return -1;
  int32_t first = 0, last = arguments.requests;
  while (last - first > 1) {
    const int32_t middle = (first + last) / 2;
    if (arguments.cu_seqlens_q[middle] <= token) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return first;
}

}  // namespace kernel_pytorch::paged_attention
