// What the two large kernels of attention's backward leave: lse and delta of every query before them, the gradients of
// sinks, and the gradient of a bias, which a block sums over everything that the bias broadcasts, in one fixed order;
// where that would leave most of the machine idle, blocks share the sum and add by atomics.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/backward.cuh"

namespace kernel_pytorch::attention {

// Eight lanes for each query: delta = sum(grad_output * output) - grad_lse.
template <class Element, bool kVectors>
__global__ void __launch_bounds__(256) query_statistics(const StatisticsArguments arguments) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x / 8;
  const int64_t row = place < arguments.rows ? place : arguments.rows - 1;
  const int64_t query = row % arguments.queries, head = row / arguments.queries % arguments.heads,
                batch = row / arguments.queries / arguments.heads;
  const RowTensor &output = arguments.output, &grad = arguments.grad_output;
  const Element* outputs =
      static_cast<const Element*>(output.data) + batch * output.batch + head * output.head + query * output.row;
  const Element* grads =
      static_cast<const Element*>(grad.data) + batch * grad.batch + head * grad.head + query * grad.row;
  constexpr int kCount = tile::Vector<Element>::kCount, kStep = kVectors ? kCount : 1;
  float delta = 0.0f;
  for (int32_t column = static_cast<int32_t>(threadIdx.x % 8) * kStep; column < arguments.value_size;
       column += 8 * kStep) {
    if constexpr (kVectors) {
      float left[kCount], right[kCount];
      tile::load_once<Element>(outputs + column).unpack(left);
      tile::load_once<Element>(grads + column).unpack(right);
#pragma unroll
      for (int i = 0; i < kCount; ++i) delta += left[i] * right[i];
    } else {
      delta += tile::to_float(outputs[column]) * tile::to_float(grads[column]);
    }
  }
  for (int distance = 4; distance > 0; distance /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, distance);
  if (threadIdx.x % 8 != 0 || place >= arguments.rows) return;
  const float lse = arguments.lse[row];
  if (arguments.grad_lse != nullptr) delta -= arguments.grad_lse[row];
  arguments.statistics[row] = {lse == tile::minus_infinity() ? -tile::minus_infinity() : lse * kLog2e, delta};
}

// A block for each head, so that the order of the sum is fixed.
__global__ void __launch_bounds__(1024) grad_sinks(const SinksArguments arguments) {
  __shared__ float parts[32];
  const int64_t head = blockIdx.x;
  const float sink = arguments.sinks[head * arguments.sinks_stride] * kLog2e;
  const int32_t queries =
      arguments.query_offsets != nullptr ? arguments.query_offsets[arguments.sequences] : arguments.queries;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(arguments.batches) * queries; i += 1024) {
    const int64_t batch = i / queries, query = i % queries;
    const QueryStatistics row = arguments.statistics[(batch * arguments.heads + head) * arguments.queries + query];
    sum -= ptx::ex2_approx_ftz_f32(sink - row.lse) * row.delta;
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = parts[threadIdx.x];
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x == 0) arguments.grad_sinks[head * arguments.grad_sinks_stride] = sum;
}

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
class MmaBias : MmaBackward<kFeatures, Element, kTile, kVectors, Of::kQueries> {
  using Base = MmaBackward<kFeatures, Element, kTile, kVectors, Of::kQueries>;
  static constexpr int kRows = rows_of(kTile), kKeys = kTile.columns;

 public:
  __device__ __forceinline__ MmaBias(const MmaBiasArguments& arguments, char* shared)
      : Base(arguments.backward, shared), bias_(arguments) {}

  __device__ __forceinline__ void run() {
    const ScoreArguments& scores = bias_.backward.scores;
    const int32_t key_tiles = (scores.keys + kKeys - 1) / kKeys, query_tiles = (scores.queries + kRows - 1) / kRows;
    int32_t index = static_cast<int32_t>(blockIdx.x);
    first_key_ = index % key_tiles * kKeys;
    index /= key_tiles;
    const bool sums = !bias_.adds;
    const Range queries = range_of(index, sums && bias_.queries == 1 ? 1 : query_tiles, query_tiles);
    const Range heads = range_of(index, sums ? bias_.heads : scores.heads, scores.heads);
    const Range batches = range_of(index, sums ? bias_.batches : scores.batches, scores.batches);
    sums_.clear();
    for (int32_t batch = batches.first; batch < batches.last; ++batch) {
      for (int32_t head = heads.first; head < heads.last; ++head) {
        this->head_ = load_head<kFeatures>(scores, batch, head);
        for (int32_t tile = queries.first; tile < queries.last; ++tile) add_tile(tile * kRows);
      }
    }
    const int64_t batch = bias_.batches == 1 ? 0 : batches.first, head = bias_.heads == 1 ? 0 : heads.first;
    float* target = bias_.grad_bias + (batch * bias_.heads + head) * bias_.queries * scores.keys;
    bias_.queries == 1 ? store_sum(target) : store_tile(target, queries.first * kRows);
  }

 private:
  struct Range {
    int32_t first, last;
  };
  // Takes a digit of `kept` values off the index: this one alone, or all of them where they are summed up.
  __device__ __forceinline__ static Range range_of(int32_t& index, int32_t kept, int32_t all) {
    const int32_t digit = index % kept;
    index /= kept;
    return kept == all ? Range{digit, digit + 1} : Range{0, all};
  }

  __device__ __forceinline__ void add_tile(int32_t first_query) {
    const Head& head = this->head_;
    if (first_query >= head.queries || first_key_ >= head.keys) return;
    const TileRange range = keys_of_queries(kFeatures, head, first_query, least(first_query + kRows, head.queries));
    if (first_key_ >= range.last || first_key_ + kKeys <= range.first) return;
    this->first_row_ = first_query;
    __syncthreads();  // everyone is done with the tiles before
    this->load_rows();
    this->load_columns(first_key_, 0);
    this->load_row_statistics();
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    Accumulator<kKeys> probabilities, grads;
    float derivatives[kKeys / 2];
    const Step step{first_key_, true, false};
    this->template score_gradients<Toward::kBias>(probabilities, grads, derivatives, step, 0,
                                                  load_dropout<kFeatures>(bias_.backward.scores, head));
    const int32_t row = first_query + this->warp_row() + static_cast<int32_t>(threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (row + i / 2 % 2 * 8 < head.queries) sums_.values[i] += grads.values[i];
    }
  }

  __device__ __forceinline__ void store_tile(float* target, int32_t first_query) const {
    const ScoreArguments& scores = bias_.backward.scores;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int64_t query = first_query + this->warp_row() + tile::fragment_row(lane, i);
      const int64_t key = first_key_ + tile::fragment_column(lane, i);
      if (query < scores.queries && key < scores.keys) store(target + query * scores.keys + key, sums_.values[i]);
    }
  }

  // The sum of all rows: of a warp by shuffles, of the warps through shared memory, one after the other.
  __device__ __forceinline__ void store_sum(float* target) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float* parts = reinterpret_cast<float*>(this->shared_);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (i / 2 % 2 != 0) continue;
      float sum = sums_.values[i] + sums_.values[i + 2];
      for (int distance = 16; distance > 2; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (lane < 4) parts[threadIdx.x / 32 * kKeys + tile::fragment_column(lane, i)] = sum;
    }
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    if (column >= kKeys || first_key_ + column >= bias_.backward.scores.keys) return;
    float sum = 0.0f;
    for (int warp = 0; warp < kTile.warps; ++warp) sum += parts[warp * kKeys + column];
    store(target + first_key_ + column, sum);
  }

  __device__ __forceinline__ void store(float* target, float sum) const {
    if (!bias_.adds) {
      *target = sum;
    } else if (sum != 0.0f) {
      atomicAdd(target, sum);
    }
  }

  const MmaBiasArguments& bias_;
  int32_t first_key_;
  Accumulator<kKeys> sums_;
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
__global__ void __launch_bounds__(kTile.warps * 32, 1)
    mma_backward_bias(const __grid_constant__ MmaBiasArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaBias<kFeatures, Element, kTile, kVectors>(arguments, shared).run();
}

}  // namespace kernel_pytorch::attention
