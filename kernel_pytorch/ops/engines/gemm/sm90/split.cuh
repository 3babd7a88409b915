// An operand of fp32 for wgmma, whose tf32 operands lie along k and keep 11 bits: [rows, k] whatever dimension was
// dense, rounded to 11 bits (kParts false) or as two parts that add up to 22 bits. Of every 32 floats of a row with
// parts the first 16 are large parts, the others the small ones of the same 16, so that a stage of the product (128
// bytes of each row) has both. Parts are rounded to nearest. One pass over memory. Lines begin at multiples of 16
// bytes. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/split_cuda.h"
#include "kernel_pytorch/ops/engines/gemm/tf32.cuh"

namespace kernel_pytorch::product {

// Of a part, whose exponent is small or which nobody reads (SplitArguments::careful).
__device__ __forceinline__ float rounded_part(float value) {
  return __uint_as_float((__float_as_uint(value) + kTf32HalfStep) & 0xffffe000u);
}

// Four neighbours along k, from `k` on. True where a value needs care.
template <bool kParts>
__device__ __forceinline__ bool store_parts(float* row, int32_t k, const float (&values)[4]) {
  const auto word = [](float value) { return __float_as_uint(value); };
  if constexpr (!kParts) {
    ptx::st_global_v4(row + k, {word(rounded_to_tf32(values[0])), word(rounded_to_tf32(values[1])),
                                word(rounded_to_tf32(values[2])), word(rounded_to_tf32(values[3]))});
    return false;
  } else {
    float large[4], small[4];
    bool is_careful = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      is_careful |= (word(values[i]) >> 23 & 255) >= kSplitCarefulExponent;
      large[i] = rounded_part(values[i]);
      small[i] = rounded_part(values[i] - large[i]);
    }
    float* target = row + k / kSplitGroup * (2 * kSplitGroup) + k % kSplitGroup;
    ptx::st_global_v4(target, {word(large[0]), word(large[1]), word(large[2]), word(large[3])});
    ptx::st_global_v4(target + kSplitGroup, {word(small[0]), word(small[1]), word(small[2]), word(small[3])});
    return is_careful;
  }
}

// Four floats from `at` of a line that ends at `end`; zeros behind it.
__device__ __forceinline__ void load_four(const float* line, int32_t at, int32_t end, bool is_inside,
                                          float (&values)[4]) {
  const ptx::Word4 words = ptx::ld_global_v4_if(is_inside && at + 4 <= end, line + at);
  values[0] = __uint_as_float(words.x), values[1] = __uint_as_float(words.y);
  values[2] = __uint_as_float(words.z), values[3] = __uint_as_float(words.w);
  if (is_inside && at < end && at + 4 > end) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (at + i < end) values[i] = line[at + i];
    }
  }
}

// k is dense: a warp takes a chunk of a row.
template <bool kParts>
__global__ void __launch_bounds__(kSplitThreads) split_along(const __grid_constant__ SplitArguments arguments) {
  constexpr int kSteps = kSplitChunk / 128;
  const int32_t row = static_cast<int32_t>(blockIdx.x * kSplitRows + threadIdx.x / 32);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (row >= arguments.rows) return;
  const int32_t first = static_cast<int32_t>(blockIdx.y) * kSplitChunk + lane * 4;
  const float* source = arguments.data + blockIdx.z * arguments.batch + row * arguments.stride;
  const int64_t line = (kParts ? 2 : 1) * static_cast<int64_t>(arguments.depth);
  float* target = arguments.target + (blockIdx.z * static_cast<int64_t>(arguments.rows) + row) * line;
  float values[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) load_four(source, first + i * 128, arguments.k, true, values[i]);
  bool is_careful = false;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (first + i * 128 < arguments.depth) {
      is_careful |= store_parts<kParts>(target, first + i * 128, values[i]);
      sum += (values[i][0] + values[i][1]) + (values[i][2] + values[i][3]);
    }
  }
  if (is_careful) *arguments.careful = 1;
  if (arguments.row_sums == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) arguments.row_sums[static_cast<int64_t>(blockIdx.y) * arguments.rows + row] = sum;
}

// Rows lie side by side: a block turns a square of kSplitEdge of them.
template <bool kParts>
__global__ void __launch_bounds__(kSplitThreads) split_across(const __grid_constant__ SplitArguments arguments) {
  constexpr int kVectors = kSplitEdge / 4;
  __shared__ float tile[kSplitEdge][kSplitPitch];
  const int32_t thread = static_cast<int32_t>(threadIdx.x), within = thread % kVectors * 4;
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) * kSplitEdge;
  const int32_t first_k = static_cast<int32_t>(blockIdx.y) * kSplitEdge;
  const float* source = arguments.data + blockIdx.z * arguments.batch;
#pragma unroll
  for (int i = 0; i < kSplitEdge * kVectors / kSplitThreads; ++i) {
    const int32_t k = (thread + i * kSplitThreads) / kVectors;
    float values[4];
    load_four(source + (first_k + k) * arguments.stride, first_row + within, arguments.rows, first_k + k < arguments.k,
              values);
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[within + j][k] = values[j];
  }
  __syncthreads();
  const int64_t line = (kParts ? 2 : 1) * static_cast<int64_t>(arguments.depth);
  bool is_careful = false;
#pragma unroll
  for (int i = 0; i < kSplitEdge * kVectors / kSplitThreads; ++i) {
    const int32_t row = (thread + i * kSplitThreads) / kVectors;
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = tile[row][within + j];
    if (first_row + row < arguments.rows && first_k + within < arguments.depth) {
      const int64_t at = blockIdx.z * static_cast<int64_t>(arguments.rows) + first_row + row;
      is_careful |= store_parts<kParts>(arguments.target + at * line, first_k + within, values);
    }
  }
  if (is_careful) *arguments.careful = 1;
  if (arguments.row_sums == nullptr || thread >= kSplitEdge || first_row + thread >= arguments.rows) return;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kSplitEdge; ++k) sum += tile[thread][k];
  arguments.row_sums[static_cast<int64_t>(blockIdx.y) * arguments.rows + first_row + thread] = sum;
}

}  // namespace kernel_pytorch::product
