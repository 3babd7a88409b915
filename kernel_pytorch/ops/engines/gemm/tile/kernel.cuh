// The plain matrix product on CUDA: tiles of floats in shared memory, fp32 FMA, whatever the types and strides. A
// finished tile goes through shared memory, so that what follows (and its many forms) stands here once, and
// neighbouring threads write neighbouring columns. sm_80.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/tf32.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"

namespace kernel_pytorch::product {

__device__ __forceinline__ float round_operand(float value, TileRounding rounding) {
  if (rounding == TileRounding::kNone) return value;
  if (rounding == TileRounding::kTf32) return rounded_to_tf32(value);
  const float high = tile::round_to<tile::BFloat16>(value);
  return rounding == TileRounding::kBf16 ? high : high + tile::round_to<tile::BFloat16>(value - high);
}

__device__ __forceinline__ float scale_at(const TileScale& scale, int32_t row, int32_t block) {
  return scale.data == nullptr ? 1.0f : scale.data[row / scale.rows_each * scale.row + block * scale.block];
}

// A thread's share of one operand's next stage: kCount elements of a tile of kTile rows, walked along whichever of its
// dimensions is dense. With kGathers row i of the operand, or with by_depth step i of k, is that of memory which the
// gather names, where there is one.
template <class T, int kTile, bool kGathers>
class TileLoader {
  static constexpr int kCount = kTile * kTileDepth / kTileThreads;

 public:
  __device__ __forceinline__ TileLoader(const TileOperand& operand, int32_t first, int32_t rows, int32_t depth,
                                        TileGather gather)
      : data_(static_cast<const T*>(operand.data) + blockIdx.z * operand.batch),
        outer_(operand.outer),
        inner_(operand.inner),
        first_(first),
        rows_(rows),
        depth_(depth),
        gather_(gather),
        along_k_(operand.inner == 1) {}

  __device__ __forceinline__ void load(int32_t k, TileRounding rounding) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t row = first_ + row_of(i), at = k + depth_of(i);
      const bool is_inside = row < rows_ && at < depth_;
      values_[i] = is_inside ? round_operand(tile::to_float(data_[offset_of(row, at)]), rounding) : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float (&target)[kTileDepth][kTile + 4]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) target[depth_of(i)][row_of(i)] = values_[i];
  }

 private:
  __device__ __forceinline__ int32_t index_of(int i) const {
    return static_cast<int32_t>(threadIdx.x) + i * kTileThreads;
  }
  __device__ __forceinline__ int32_t row_of(int i) const {
    return along_k_ ? index_of(i) / kTileDepth : index_of(i) % kTile;
  }
  __device__ __forceinline__ int32_t depth_of(int i) const {
    return along_k_ ? index_of(i) % kTileDepth : index_of(i) / kTile;
  }

  __device__ __forceinline__ int64_t offset_of(int64_t row, int64_t at) const {
    if constexpr (kGathers) {
      if (gather_.index != nullptr) (gather_.by_depth ? at : row) = gather_.index[gather_.by_depth ? at : row];
    }
    return row * outer_ + at * inner_;
  }

  const T* data_;
  int64_t outer_, inner_;
  int32_t first_, rows_, depth_;
  TileGather gather_;
  bool along_k_;
  float values_[kCount];
};

// Up to 64 finished rows of a tile: not inlined, for the many forms need no copies and no registers of the product's.
template <class Real, int kTile>
__device__ __noinline__ void finish_rows(const TileArguments& arguments, const Real (&finished)[kTileRowsAtOnce][kTile],
                                         int32_t first_row, int32_t first_column) {
  TileFinish<Real> finish(arguments);
#pragma unroll 1
  for (int32_t pair = threadIdx.x; pair < kTileRowsAtOnce * kTile / 2; pair += kTileThreads) {
    const int32_t row = pair / (kTile / 2), column = pair % (kTile / 2) * 2;
    finish.finish(first_row + row, first_column + column, finished[row][column], finished[row][column + 1]);
  }
  finish.publish_amax();
}

template <class A, class B, int kPer, bool kBlocked, bool kGathers = false>
class TileProduct {
  static constexpr int kTile = tile_edge(kPer);
  // The sums of a chain are added to the whole's: one chain over all of k would round k times at the size of the
  // result.
  static constexpr int kChain = kBlocked ? kTileScaleBlock : kTileChain;
  using Stage = float[kTileDepth][kTile + 4];

 public:
  struct Shared {
    union {
      struct {
        Stage a, b;
      };
      float finished[kTileRowsAtOnce][kTile];
    };
  };

  __device__ __forceinline__ TileProduct(const TileArguments& arguments, Shared& shared, int32_t first_row,
                                         int32_t first_column, TileGather gather_a = {}, TileGather gather_b = {})
      : arguments_(arguments),
        shared_(shared),
        first_row_(first_row),
        first_column_(first_column),
        gather_a_(gather_a),
        gather_b_(gather_b) {}

  __device__ __forceinline__ void run() {
    float sums[kPer][kPer] = {};
    multiply(sums);
    if (!kBlocked && (arguments_.scale_a.data != nullptr || arguments_.scale_b.data != nullptr)) scale(sums, sums, 0);
    finish(sums);
  }

 private:
  // A thread's rows and columns come in fours, 64 apart.
  static __device__ __forceinline__ int32_t row_of(int i) {
    return i / 4 * 64 + static_cast<int32_t>(threadIdx.x / 16) * 4 + i % 4;
  }
  static __device__ __forceinline__ int32_t column_of(int j) {
    return j / 4 * 64 + static_cast<int32_t>(threadIdx.x % 16) * 4 + j % 4;
  }

  __device__ __forceinline__ void multiply(float (&sums)[kPer][kPer]) {
    TileLoader<A, kTile, kGathers> a(arguments_.a, first_row_, arguments_.m, arguments_.k, gather_a_);
    TileLoader<B, kTile, kGathers> b(arguments_.b, first_column_, arguments_.n, arguments_.k, gather_b_);
    float part[kPer][kPer] = {};
    float row_sum = 0.0f;
    a.load(0, arguments_.rounding);
    b.load(0, arguments_.rounding);
#pragma unroll 1
    for (int32_t k = 0; k < arguments_.k; k += kTileDepth) {
      a.store(shared_.a);
      b.store(shared_.b);
      __syncthreads();
      a.load(k + kTileDepth, arguments_.rounding);
      b.load(k + kTileDepth, arguments_.rounding);
      add_stage(part);
      if (wants_row_sums()) row_sum += arguments_.rounding == TileRounding::kNone ? sum_of_stage() : sum_of_memory(k);
      if ((k + kTileDepth) % kChain == 0) fold(sums, part, k / kChain);
      __syncthreads();
    }
    if (arguments_.k % kChain != 0) fold(sums, part, arguments_.k / kChain);
    const int32_t row = first_row_ + static_cast<int32_t>(threadIdx.x);
    if (wants_row_sums() && row < arguments_.m) {
      store_any(arguments_.row_sums, blockIdx.z * arguments_.row_sums.batch + row, row_sum);
    }
  }

  __device__ __forceinline__ bool wants_row_sums() const {
    return arguments_.row_sums.data != nullptr && blockIdx.x == 0 && threadIdx.x < kTile;
  }
  __device__ __forceinline__ float sum_of_stage() const {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) sum += shared_.a[k][threadIdx.x];
    return sum;
  }

  // Row sums are those of a as it is, not as it is multiplied: a stage of rounded operands has lost it.
  __device__ __noinline__ float sum_of_memory(int32_t first) const {
    const int32_t row = first_row_ + static_cast<int32_t>(threadIdx.x);
    if (row >= arguments_.m) return 0.0f;
    const TileOperand& a = arguments_.a;
    const A* data = static_cast<const A*>(a.data) + blockIdx.z * a.batch + row * a.outer;
    float sum = 0.0f;
    for (int32_t k = first; k < min(first + kTileDepth, arguments_.k); ++k) sum += tile::to_float(data[k * a.inner]);
    return sum;
  }

  __device__ __forceinline__ void add_stage(float (&sums)[kPer][kPer]) const {
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      float a[kPer], b[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) a[i] = shared_.a[k][row_of(i)];
#pragma unroll
      for (int j = 0; j < kPer; ++j) b[j] = shared_.b[k][column_of(j)];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
  }

  __device__ __forceinline__ void scale(float (&target)[kPer][kPer], const float (&values)[kPer][kPer],
                                        int32_t block) const {
    float of_columns[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      of_columns[j] = scale_at(arguments_.scale_b, min(first_column_ + column_of(j), arguments_.n - 1), block);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float of_row = scale_at(arguments_.scale_a, min(first_row_ + row_of(i), arguments_.m - 1), block);
#pragma unroll
      for (int j = 0; j < kPer; ++j) target[i][j] = values[i][j] * (of_row * of_columns[j]);
    }
  }
  // The sums of a chain, scaled where blocks of k have scales, into the whole's.
  __device__ __forceinline__ void fold(float (&sums)[kPer][kPer], float (&part)[kPer][kPer], int32_t block) const {
    if (kBlocked) scale(part, part, block);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        sums[i][j] += part[i][j];
        part[i][j] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void finish(const float (&sums)[kPer][kPer]) {
#pragma unroll
    for (int group = 0; group < kPer / 4; ++group) {
      __syncthreads();
#pragma unroll
      for (int i = 4 * group; i < 4 * group + 4; ++i) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) shared_.finished[row_of(i) % kTileRowsAtOnce][column_of(j)] = sums[i][j];
      }
      __syncthreads();
      finish_rows(arguments_, shared_.finished, first_row_ + group * kTileRowsAtOnce, first_column_);
    }
  }

  const TileArguments& arguments_;
  Shared& shared_;
  int32_t first_row_, first_column_;
  TileGather gather_a_, gather_b_;
};

template <class A, class B, int kPer, bool kBlocked>
__global__ void __launch_bounds__(kTileThreads, kPer == 8 ? 1 : 2)
    tile_product(const __grid_constant__ TileArguments arguments) {
  __shared__ typename TileProduct<A, B, kPer, kBlocked>::Shared shared;
  constexpr int kTile = tile_edge(kPer);
  TileProduct<A, B, kPer, kBlocked>(arguments, shared, static_cast<int32_t>(blockIdx.y) * kTile,
                                    static_cast<int32_t>(blockIdx.x) * kTile)
      .run();
}

}  // namespace kernel_pytorch::product
