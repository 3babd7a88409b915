// What forward and backward of attention in fp64 share: operands in shared memory, scores by the tensor cores' mma of
// doubles, and what stands between the products. sm_80. Written without a GPU at hand: it has run on the emulated one.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/double_fragments.cuh"
#include "kernel_pytorch/ops/attention/cuda_double/tile_cuda.h"

namespace kernel_pytorch::attention {

__device__ __forceinline__ double minus_infinity() {
  return -__longlong_as_double(0x7ff0000000000000ll);
}

// A head of a batch: its keys and where its queries stand among them.
struct DoubleHead {
  int32_t batch, head, key_head, keys;
  int64_t offset;
  double slope;
};
__device__ __forceinline__ DoubleHead double_head(const DoubleArguments& arguments, int32_t batch, int32_t head) {
  DoubleHead result = {batch, head, head / arguments.group, arguments.keys, arguments.offset, 0.0};
  if (arguments.key_lengths != nullptr) {
    const int32_t length = arguments.key_lengths[batch * arguments.key_lengths_stride];
    result.keys = greatest(0, least(arguments.keys, length));
  }
  if (!arguments.has_offset) result.offset = aligned_offset(arguments.queries, arguments.keys, result.keys);
  if (arguments.alibi_slopes.data != nullptr) {
    const ScoreTensor& slopes = arguments.alibi_slopes;
    result.slope = static_cast<const double*>(slopes.data)[batch * slopes.batch + head * slopes.head];
  }
  return result;
}

// kRows rows from `first` of a head into shared memory; zeros beyond the rows and columns that there are.
template <DoubleTile kTile, int kRows>
__device__ __forceinline__ void load_doubles(const RowTensor& tensor, int32_t batch, int32_t head, int32_t first,
                                             int32_t end, int32_t columns, uint32_t target) {
  const double* data = static_cast<const double*>(tensor.data) + batch * tensor.batch + head * tensor.head;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kRows * kTile.size; i += 32 * kTile.warps) {
    const int32_t row = i / kTile.size, column = i % kTile.size;
    const bool is_inside = first + row < end && column < columns;
    const double* source = is_inside ? data + (first + row) * tensor.row + column : data;
    ptx::cp_async_ca_shared_global_8_fill(target + (row * double_pitch(kTile) + column) * 8, source,
                                          is_inside ? 8u : 0u);
  }
}

// 16 rows from `rows` times the columns from `columns` on, along the head size; both lines of shared memory.
template <DoubleTile kTile>
__device__ __forceinline__ void multiply_lines(double (&products)[kTile.columns / 8][4], const double* rows,
                                               const double* columns) {
  constexpr int kPitch = double_pitch(kTile);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const double* of_row = rows + lane / 4 * kPitch + lane % 4;
  const double* of_column = columns + lane / 4 * kPitch + lane % 4;
#pragma unroll
  for (int j = 0; j < kTile.columns / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) products[j][r] = 0.0;
  }
#pragma unroll 4
  for (int k = 0; k < kTile.size; k += 4) {
    const double a[2] = {of_row[k], of_row[8 * kPitch + k]};
#pragma unroll
    for (int j = 0; j < kTile.columns / 8; ++j) {
      tile::multiply_doubles(products[j], a, of_column[8 * j * kPitch + k]);
    }
  }
}

// sums += weights times lines of shared memory, a line for each column of the weights. A step of four takes the columns
// that the lanes hold, 2 * (lane % 4) or the next of eight, so that nothing changes lanes.
template <DoubleTile kTile>
__device__ __forceinline__ void add_lines(double (&sums)[kTile.size / 8][4],
                                          const double (&weights)[kTile.columns / 8][4], const double* lines) {
  constexpr int kPitch = double_pitch(kTile);
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kTile.columns / 8; ++j) {
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      const double a[2] = {weights[j][next], weights[j][2 + next]};
      const double* line = lines + (8 * j + lane % 4 * 2 + next) * kPitch + lane / 4;
#pragma unroll
      for (int i = 0; i < kTile.size / 8; ++i) tile::multiply_doubles(sums[i], a, line[8 * i]);
    }
  }
}

__device__ __forceinline__ bool keeps(const DoubleArguments& arguments, const DoubleHead& head, int32_t query,
                                      int32_t key) {
  if (query >= arguments.queries || key >= head.keys) return false;
  const int64_t distance = static_cast<int64_t>(key) - query - head.offset;
  if (distance > arguments.right || distance < -arguments.left) return false;
  if (arguments.query_ids != nullptr) {
    const int32_t of_query =
        arguments.query_ids[head.batch * arguments.query_ids_batch + query * arguments.query_ids_row];
    const int32_t of_key = arguments.key_ids[head.batch * arguments.key_ids_batch + key * arguments.key_ids_row];
    if (of_query != of_key || of_query == -1) return false;
  }
  if (arguments.mask.data != nullptr) {
    const ScoreTensor& mask = arguments.mask;
    const auto* data = static_cast<const uint8_t*>(mask.data);
    if (data[head.batch * mask.batch + head.head * mask.head + query * mask.query + key * mask.key] == 0) return false;
  }
  return true;
}

// A kept score of a product, and its derivative by the product.
struct DoubleScore {
  double value, derivative;
};
__device__ __forceinline__ DoubleScore double_score(const DoubleArguments& arguments, const DoubleHead& head,
                                                    int32_t query, int32_t key, double product) {
  DoubleScore score = {arguments.scale * product, arguments.scale};
  const auto cap = [&] {
    const double share = tanh(score.value / arguments.softcap);
    score.value = arguments.softcap * share;
    score.derivative *= 1.0 - share * share;
  };
  if (arguments.softcap > 0 && !arguments.softcap_after) cap();
  if (arguments.bias.data != nullptr) {
    const ScoreTensor& bias = arguments.bias;
    const auto* data = static_cast<const double*>(bias.data);
    score.value += data[head.batch * bias.batch + head.head * bias.head + query * bias.query + key * bias.key];
  }
  if (arguments.alibi_slopes.data != nullptr) {
    const int64_t distance = static_cast<int64_t>(key) - query - head.offset;
    score.value -= head.slope * static_cast<double>(distance < 0 ? -distance : distance);
  }
  if (arguments.softcap > 0 && arguments.softcap_after) cap();
  return score;
}

// The keys that queries [first, last) may see, and the queries that may see keys [first, last), as far as bounds and
// lengths go.
struct DoubleRange {
  int32_t first, last;
};
__device__ __forceinline__ DoubleRange bounded(int64_t first, int64_t last, int32_t end) {
  first = first < 0 ? 0 : first > end ? end : first;
  last = last < first ? first : last > end ? end : last;
  return {static_cast<int32_t>(first), static_cast<int32_t>(last)};
}
__device__ __forceinline__ DoubleRange keys_seen(const DoubleArguments& arguments, const DoubleHead& head,
                                                 int32_t first, int32_t last) {
  return bounded(first + head.offset - arguments.left, last + head.offset + arguments.right, head.keys);
}
__device__ __forceinline__ DoubleRange queries_seeing(const DoubleArguments& arguments, const DoubleHead& head,
                                                      int32_t first, int32_t last) {
  return bounded(first - head.offset - arguments.right, last - head.offset + arguments.left, arguments.queries);
}

}  // namespace kernel_pytorch::attention
