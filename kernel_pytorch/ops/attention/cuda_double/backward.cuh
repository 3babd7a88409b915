// Attention in fp64, backward: a warp has 16 rows of the gradient that a launch computes, and walks over the others, so
// that sums are taken in one order. sm_80. Written without a GPU at hand: it has run on the emulated one.
#pragma once

#include "kernel_pytorch/ops/attention/cuda_double/scores.cuh"

namespace kernel_pytorch::attention {

// delta = sum(grad_output * output) - grad_lse, a warp for each row.
__global__ void __launch_bounds__(128) double_statistics(const __grid_constant__ DoubleArguments arguments) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t of_batch = static_cast<int64_t>(arguments.heads) * arguments.queries;
  if (row >= of_batch * arguments.batches) return;
  const int64_t batch = row / of_batch, rest = row - batch * of_batch;
  const int64_t head = rest / arguments.queries, query = rest - head * arguments.queries;
  const auto line = [&](const RowTensor& tensor) {
    return static_cast<const double*>(tensor.data) + batch * tensor.batch + head * tensor.head + query * tensor.row;
  };
  const double *grad = line(arguments.grad_output), *output = line(arguments.output);
  double sum = 0.0;
  for (int32_t i = lane; i < arguments.value_size; i += 32) sum += grad[i] * output[i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) arguments.delta[row] = arguments.grad_lse == nullptr ? sum : sum - arguments.grad_lse[row];
}

template <DoubleTile kTile, DoubleOf kOf>
class DoubleBackward {
  static constexpr bool kOfQueries = kOf == DoubleOf::kQueries, kOfValues = kOf == DoubleOf::kValues;
  static constexpr int kPitch = double_pitch(kTile), kRows = double_rows(kTile);

 public:
  __device__ __forceinline__ DoubleBackward(const DoubleArguments& arguments, unsigned char* memory)
      : arguments_(arguments),
        lines_(reinterpret_cast<const double*>(memory)),
        target_(ptx::shared_address(memory)),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        of_warp_(static_cast<int32_t>(threadIdx.x / 32) * 16),
        first_row_(static_cast<int32_t>(blockIdx.x) * kRows) {}

  __device__ __forceinline__ void run() {
    const int32_t heads = kOfQueries ? arguments_.heads : arguments_.heads / arguments_.group;
    const int32_t batch = static_cast<int32_t>(blockIdx.y) / heads;
    const int32_t own = static_cast<int32_t>(blockIdx.y) - batch * heads;
    const int32_t rows = kOfQueries ? arguments_.queries : arguments_.keys;
    const int32_t key_head = kOfQueries ? own / arguments_.group : own;
    if constexpr (kOfQueries) {
      load<kRows>(arguments_.query, batch, own, first_row_, rows, arguments_.size, 0);
      load<kRows>(arguments_.grad_output, batch, own, first_row_, rows, arguments_.value_size, kRows);
      walk(double_head(arguments_, batch, own));
    } else {
      load<kRows>(arguments_.key, batch, key_head, first_row_, rows, arguments_.size, 0);
      load<kRows>(arguments_.value, batch, key_head, first_row_, rows, arguments_.value_size, kRows);
      for (int32_t i = 0; i < arguments_.group; ++i) {
        walk(double_head(arguments_, batch, key_head * arguments_.group + i));
      }
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();  // where there was no tile
    store(batch, own, rows);
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void load(const RowTensor& tensor, int32_t batch, int32_t head, int32_t first, int32_t end,
                                       int32_t columns, int line) const {
    load_doubles<kTile, kCount>(tensor, batch, head, first, end, columns, target_ + line * kPitch * 8);
  }

  __device__ __forceinline__ void walk(const DoubleHead& head) {
    const int32_t last_row = least(first_row_ + kRows, kOfQueries ? arguments_.queries : head.keys);
    if (last_row <= first_row_) return;
    const DoubleRange range = kOfQueries ? keys_seen(arguments_, head, first_row_, last_row)
                                         : queries_seeing(arguments_, head, first_row_, last_row);
    const int32_t end = kOfQueries ? head.keys : arguments_.queries;
    constexpr int kColumn = 2 * kRows, kOtherColumn = 2 * kRows + kTile.columns;  // lines
#pragma unroll 1
    for (int32_t first = range.first / kTile.columns * kTile.columns; first < range.last; first += kTile.columns) {
      __syncthreads();
      const int32_t of_columns = kOfQueries ? head.key_head : head.head;
      load<kTile.columns>(kOfQueries ? arguments_.key : arguments_.query, head.batch, of_columns, first, end,
                          arguments_.size, kColumn);
      load<kTile.columns>(kOfQueries ? arguments_.value : arguments_.grad_output, head.batch, of_columns, first, end,
                          arguments_.value_size, kOtherColumn);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      double weights[kTile.columns / 8][4], of_weights[kTile.columns / 8][4];
      multiply_lines<kTile>(weights, lines_ + of_warp_ * kPitch, lines_ + kColumn * kPitch);
      if constexpr (!kOfValues) {
        multiply_lines<kTile>(of_weights, lines_ + (kRows + of_warp_) * kPitch, lines_ + kOtherColumn * kPitch);
      }
#pragma unroll
      for (int j = 0; j < kTile.columns / 8; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int32_t row = first_row_ + of_warp_ + lane_ / 4 + r / 2 * 8;
          const int32_t column = first + 8 * j + lane_ % 4 * 2 + r % 2;
          weights[j][r] = weight(head, kOfQueries ? row : column, kOfQueries ? column : row, weights[j][r],
                                 kOfValues ? 0.0 : of_weights[j][r]);
        }
      }
      add_lines<kTile>(sums_, weights, lines_ + (kOfValues ? kOtherColumn : kColumn) * kPitch);
    }
  }

  // The probability, or the gradient of the product.
  __device__ __forceinline__ double weight(const DoubleHead& head, int32_t query, int32_t key, double product,
                                           double of_probability) const {
    if (!keeps(arguments_, head, query, key)) return 0.0;
    const DoubleScore score = double_score(arguments_, head, query, key, product);
    if (score.value == minus_infinity()) return 0.0;
    const int64_t row = (static_cast<int64_t>(head.batch) * arguments_.heads + head.head) * arguments_.queries + query;
    const double probability = exp(score.value - arguments_.lse[row]);
    if constexpr (kOfValues) return probability;
    return probability * (of_probability - arguments_.delta[row]) * score.derivative;
  }

  __device__ __forceinline__ void store(int32_t batch, int32_t head, int32_t rows) const {
    const RowTensor& result = arguments_.result;
    const int32_t columns = kOfValues ? arguments_.value_size : arguments_.size;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row_ + of_warp_ + lane_ / 4 + 8 * half;
      if (row >= rows) continue;
      double* line = static_cast<double*>(result.data) + batch * result.batch + head * result.head + row * result.row;
#pragma unroll
      for (int i = 0; i < kTile.size / 8; ++i) {
#pragma unroll
        for (int next = 0; next < 2; ++next) {
          const int32_t column = 8 * i + lane_ % 4 * 2 + next;
          if (column < columns) line[column] = sums_[i][2 * half + next];
        }
      }
    }
  }

  const DoubleArguments& arguments_;
  const double* lines_;
  uint32_t target_;  // shared memory: rows of two operands, then columns of two
  int32_t lane_, of_warp_, first_row_;
  double sums_[kTile.size / 8][4] = {};
};

template <DoubleTile kTile, DoubleOf kOf>
__global__ void __launch_bounds__(32 * kTile.warps, 1)
    double_backward(const __grid_constant__ DoubleArguments arguments) {
  static_assert(is_legal(kTile));
  extern __shared__ __align__(16) unsigned char memory[];
  DoubleBackward<kTile, kOf>(arguments, memory).run();
}

}  // namespace kernel_pytorch::attention
