// Attention in fp64, forward: a warp has 16 queries and walks over the keys with a running maximum and sum. sm_80.
// Written without a GPU at hand: it has run on the emulated one.
#pragma once

#include "kernel_pytorch/ops/attention/cuda_double/scores.cuh"

namespace kernel_pytorch::attention {

template <DoubleTile kTile>
__global__ void __launch_bounds__(32 * kTile.warps, 1)
    double_forward(const __grid_constant__ DoubleArguments arguments) {
  static_assert(is_legal(kTile));
  constexpr int kPitch = double_pitch(kTile), kRows = double_rows(kTile);
  extern __shared__ __align__(16) unsigned char memory[];
  const auto* queries = reinterpret_cast<const double*>(memory);
  const double* keys = queries + kRows * kPitch;
  const double* values = keys + kTile.columns * kPitch;
  const uint32_t target = ptx::shared_address(memory);
  const uint32_t of_keys = target + kRows * kPitch * 8, of_values = of_keys + kTile.columns * kPitch * 8;

  const int32_t batch = static_cast<int32_t>(blockIdx.y) / arguments.heads;
  const DoubleHead head = double_head(arguments, batch, static_cast<int32_t>(blockIdx.y) - batch * arguments.heads);
  const int32_t first_query = static_cast<int32_t>(blockIdx.x) * kRows;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), of_warp = static_cast<int32_t>(threadIdx.x / 32) * 16;
  const int32_t row = first_query + of_warp + lane / 4;  // and that eight further
  load_doubles<kTile, kRows>(arguments.query, batch, head.head, first_query, arguments.queries, arguments.size, target);

  double sums[kTile.size / 8][4] = {}, largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0, 0.0};
  const DoubleRange range = keys_seen(arguments, head, first_query, least(first_query + kRows, arguments.queries));
#pragma unroll 1
  for (int32_t first = range.first / kTile.columns * kTile.columns; first < range.last; first += kTile.columns) {
    __syncthreads();  // all warps have read the tile before
    load_doubles<kTile, kTile.columns>(arguments.key, batch, head.key_head, first, head.keys, arguments.size, of_keys);
    load_doubles<kTile, kTile.columns>(arguments.value, batch, head.key_head, first, head.keys, arguments.value_size,
                                       of_values);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    double weights[kTile.columns / 8][4];
    multiply_lines<kTile>(weights, queries + of_warp * kPitch, keys);
    double most[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int j = 0; j < kTile.columns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int32_t query = row + r / 2 * 8, key = first + 8 * j + lane % 4 * 2 + r % 2;
        double& weight = weights[j][r];
        weight = keeps(arguments, head, query, key) ? double_score(arguments, head, query, key, weight).value
                                                    : minus_infinity();
        most[r / 2] = fmax(most[r / 2], weight);
      }
    }
    double base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmax(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
      most[half] = fmax(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2));
      const double next = fmax(largest[half], most[half]);
      base[half] = next == minus_infinity() ? 0.0 : next;
      const double factor = exp(largest[half] - base[half]);
      largest[half] = next;
      total[half] *= factor;
#pragma unroll
      for (int i = 0; i < kTile.size / 8; ++i) sums[i][2 * half] *= factor, sums[i][2 * half + 1] *= factor;
    }
#pragma unroll
    for (int j = 0; j < kTile.columns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        weights[j][r] = exp(weights[j][r] - base[r / 2]);
        total[r / 2] += weights[j][r];
      }
    }
    add_lines<kTile>(sums, weights, values);
  }
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();  // of the queries, where there was no tile

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    const int32_t query = row + 8 * half;
    if (query >= arguments.queries) continue;
    double factor = 1.0, base = largest[half];
    if (arguments.sinks != nullptr) {
      const double sink = arguments.sinks[head.head * arguments.sinks_stride];
      base = sink != sink ? sink : fmax(base, sink);
      factor = base == minus_infinity() ? 1.0 : exp(largest[half] - base);
      total[half] = total[half] * factor + (base == minus_infinity() ? 0.0 : exp(sink - base));
    }
    const bool has_nothing = largest[half] == minus_infinity() && total[half] == total[half];
    factor /= total[half];
    if (arguments.lse != nullptr) {
      const double lse = total[half] == 0.0 ? minus_infinity() : base + log(total[half]);
      arguments.lse[static_cast<int64_t>(blockIdx.y) * arguments.queries + query] = lse;
    }
    double* output = static_cast<double*>(arguments.output.data) + batch * arguments.output.batch +
                     head.head * arguments.output.head + query * arguments.output.row;
#pragma unroll
    for (int i = 0; i < kTile.size / 8; ++i) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const int32_t column = 8 * i + lane % 4 * 2 + next;
        if (column < arguments.value_size) {
          output[column] = has_nothing ? 0.0 : sums[i][2 * half + next] * factor;
        }
      }
    }
  }
}

}  // namespace kernel_pytorch::attention
