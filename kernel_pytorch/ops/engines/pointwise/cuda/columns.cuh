// The backward that also sums over rows: tiles of columns, many rows of each, one partial row of the biases' gradients
// a block. A thread stays in its columns, so that bias, dropout's keys and sums are in registers for all of its rows,
// addresses move by additions, and the next row is on its way while one is computed.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/backward.cuh"

namespace kernel_pytorch::pointwise {

// Blocks that a multiprocessor holds: without the bound, what never changes over the rows takes the registers. On
// sm_100 four would spill.
#if __CUDA_ARCH__ < 1000
inline constexpr int kMostColumnBlocks = 4;
#else
inline constexpr int kMostColumnBlocks = 3;
#endif
template <bool kGated>
inline constexpr int kColumnBlocks = kGated ? 2 : kMostColumnBlocks;

// Where a thread is in a tensor: the same columns, ever kTileRows further down.
class RowCursor {
 public:
  __device__ __forceinline__ RowCursor(const RowTensor& tensor, const VectorPlace& place)
      : address_(const_cast<char*>(address_of(tensor, place))), step_(kTileRows * tensor.row_stride_bytes) {}
  template <class T>
  __device__ __forceinline__ tile::Vector<T> load_next() {
    const tile::Vector<T> vector = tile::load_once<T>(address_);
    address_ += step_;
    return vector;
  }
  template <class T>
  __device__ __forceinline__ void store_next(const float (&values)[tile::Vector<T>::kCount]) {
    tile::store<T>(address_, tile::Vector<T>::pack(values));
    address_ += step_;
  }

 private:
  char* address_;
  int64_t step_;
};

// Adds the tile's rows in order and writes the block's partial row. All threads of the block call it.
template <int kCount>
__device__ __forceinline__ void store_partial(float* partial, int64_t columns, uint32_t column,
                                              const float (&sums)[kCount]) {
  __shared__ float strips[kTileRows][kTileVectors][kCount];
  const int lane = threadIdx.x % kTileVectors, strip = threadIdx.x / kTileVectors;
  __syncthreads();  // the one before may still be read
#pragma unroll
  for (int j = 0; j < kCount; ++j) strips[strip][lane][j] = sums[j];
  __syncthreads();
  const uint32_t first_column = (column - lane) * kCount;
  for (int i = threadIdx.x; i < kTileVectors * kCount; i += kThreads) {
    float total = 0;
    for (int other = 0; other < kTileRows; ++other) total += strips[other][i / kCount][i % kCount];
    if (first_column + i < columns) partial[blockIdx.y * columns + first_column + i] = total;
  }
}

// A thread's rows of one column of vectors.
template <class T, bool kGated>
class ColumnWalk {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;

  // `left`: rows from `place` to the end of the block's.
  __device__ __forceinline__ ColumnWalk(const BackwardArguments& arguments, const VectorPlace& place, int32_t left)
      : grad_output_(arguments.grad_output, place),
        gate_(arguments.gate, place),
        up_(arguments.up, place),
        grad_gate_(arguments.grad_gate, place),
        grad_up_(arguments.grad_up, place),
        left_(left) {
    if (left > 0) request();
    add_bias<T>(arguments.gate_bias, arguments.bias_is_float, place.column, gate_bias_);
    if constexpr (kGated) add_bias<T>(arguments.up_bias, arguments.bias_is_float, place.column, up_bias_);
  }

  // `vector` is the first row's place in the contiguous output, `row_vectors` the distance to the next.
  template <Kind kKind>
  __device__ __forceinline__ void run(const Dropout& dropout, uint32_t vector, uint32_t row_vectors) {
    for (; left_ > 0; left_ -= kTileRows) {
      step<kKind>(dropout, vector);
      vector += kTileRows * row_vectors;
    }
  }

  float gate_sums[kCount] = {}, up_sums[kCount] = {};

 private:
  __device__ __forceinline__ void request() {
    next_grad_output_ = grad_output_.template load_next<T>();
    next_gate_ = gate_.template load_next<T>();
    if constexpr (kGated) next_up_ = up_.template load_next<T>();
  }

  template <Kind kKind>
  __device__ __forceinline__ void step(const Dropout& dropout, uint32_t vector) {
    float gradient[kCount], values[kCount], factors[kCount], grad_gate[kCount], grad_up[kCount];
    next_grad_output_.unpack(gradient);
    next_gate_.unpack(values);
    if constexpr (kGated) next_up_.unpack(factors);
    if (left_ > kTileRows) request();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values[j] += gate_bias_[j];
      if constexpr (kGated) factors[j] += up_bias_[j];
    }
    dropout.apply<kCount>(vector, gradient);
    differentiate_vector<kKind, kIsAccurate<T>, kGated>(gradient, values, factors, grad_gate, grad_up);
    grad_gate_.template store_next<T>(grad_gate);
    if constexpr (kGated) grad_up_.template store_next<T>(grad_up);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      gate_sums[j] += grad_gate[j];
      if constexpr (kGated) up_sums[j] += grad_up[j];
    }
  }

  RowCursor grad_output_, gate_, up_, grad_gate_, grad_up_;
  int32_t left_;
  tile::Vector<T> next_grad_output_, next_gate_, next_up_;
  float gate_bias_[kCount] = {}, up_bias_[kCount] = {};
};

template <class T, bool kGated>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<kGated>)
    backward_columns(const __grid_constant__ BackwardArguments arguments) {
  using Walk = ColumnWalk<T, kGated>;
  const uint32_t row_vectors = arguments.shape.row_vectors.divisor;
  const uint32_t column = blockIdx.x * kTileVectors + threadIdx.x % kTileVectors;
  const uint32_t first_row = blockIdx.y * arguments.rows_per_block;
  const uint32_t row = first_row + threadIdx.x / kTileVectors;
  const uint32_t end = min(first_row + arguments.rows_per_block, static_cast<uint32_t>(arguments.shape.rows));
  const bool is_inside = column < row_vectors && row < end;
  const VectorPlace place{is_inside ? row : 0, is_inside ? column : 0};
  Walk walk(arguments, place, is_inside ? static_cast<int32_t>(end - row) : 0);
  const Dropout dropout = Dropout::for_rows(arguments.dropout);
  with_kind(arguments.kind, [&](auto constant) {
    walk.template run<constant.value>(dropout, row * row_vectors + column, row_vectors);
  });
  const int64_t columns = static_cast<int64_t>(row_vectors) * Walk::kCount;
  if (arguments.gate_partial != nullptr) store_partial(arguments.gate_partial, columns, column, walk.gate_sums);
  if constexpr (kGated) {
    if (arguments.up_partial != nullptr) store_partial(arguments.up_partial, columns, column, walk.up_sums);
  }
}

}  // namespace kernel_pytorch::pointwise
