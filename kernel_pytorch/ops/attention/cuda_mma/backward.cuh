// Attention's backward on mma, for every option, without atomics: one kernel keeps a tile of keys and walks
// over the queries that see it (gradients of keys and values), another keeps a tile of queries and walks over its keys
// (gradient of queries). Both compute scores and their gradients anew, seven products in place of five; in return the
// second operand of every product is as it lies in memory, and each gradient is summed in one fixed order. Where the
// registers do not hold the gradients of keys and of values at once, each has a kernel: eight products.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/kept.cuh"
#include "kernel_pytorch/ops/attention/cuda/softmax.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/products.cuh"

namespace kernel_pytorch::attention {

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors, Of kOf>
class MmaBackward {
  static constexpr bool kForKeys = kOf != Of::kQueries;
  static constexpr bool kOfScores = kOf != Of::kValues, kOfValues = kOf == Of::kValues || kOf == Of::kKeysAndValues;
  static constexpr int kRows = rows_of(kTile), kColumns = kTile.columns;
  // A slice of values ends with them: beyond lies no shared memory of this block.
  static constexpr int kSlice = !kOfScores && kTile.slice > kTile.value_size ? kTile.value_size : kTile.slice;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kCount = kColumns / 2;  // scores of a thread
  static constexpr int kPitch = query_pitch(kTile), kValuePitch = value_pitch(kTile);
  static constexpr int kStageBytes = kColumns * (kPitch + kValuePitch + 8);
  static constexpr Rows kOrientation = kForKeys ? Rows::kKeys : Rows::kQueries;
  static_assert(kTile.row_blocks == 1 && sizeof(Element) == kTile.bytes);

 public:
  __device__ __forceinline__ MmaBackward(const MmaBackwardArguments& arguments, char* shared)
      : arguments_(arguments), scores_(arguments.scores), shared_(shared) {}

  __device__ __forceinline__ void find_tile() {
    constexpr int kWidest = !kOfScores || (kOfValues && kTile.value_size > kTile.size) ? kTile.value_size : kTile.size;
    const int slices = slices_of(kWidest, kSlice);
    int32_t index = static_cast<int32_t>(blockIdx.x);
    first_column_ = index % slices * kSlice;
    index /= slices;
    // The longest walks of a causal head first.
    const UnitTile at = unit_tile<kFeatures>(arguments_.places, index, arguments_.tiles, !kForKeys);
    first_row_ = at.tile * kRows;
    const int32_t heads = kForKeys ? scores_.heads / scores_.group : scores_.heads;
    head_ = load_head<kFeatures>(scores_, at.unit / heads, at.unit % heads * (kForKeys ? scores_.group : 1));
  }

  __device__ __forceinline__ void run() {
    find_tile();
    if (first_row_ >= rows()) return;
    first_[0].clear();
    second_[0].clear();
    const int32_t heads = kForKeys ? scores_.group : 1;
    load_rows();
    for (int32_t i = 0; i < heads; ++i) {
      if (i > 0) head_ = load_head<kFeatures>(scores_, head_.batch, head_.head + 1);
      walk();
    }
    finish();
  }

 protected:
  __device__ __forceinline__ int32_t rows() const { return kForKeys ? padded_keys() : head_.queries; }
  // Keys beyond a batch's length have a gradient too: 0.
  __device__ __forceinline__ int32_t padded_keys() const {
    if constexpr (kFeatures.packed && kFeatures.key_lengths) {
      return least(scores_.key_offsets[head_.batch + 1] - scores_.key_offsets[head_.batch], scores_.keys);
    }
    return kFeatures.key_lengths ? scores_.keys : head_.keys;
  }
  __device__ __forceinline__ int32_t key_head() const { return head_.head / scores_.group; }
  __device__ __forceinline__ int32_t warp_row() const { return static_cast<int32_t>(threadIdx.x / 32) * 16; }

  __device__ __forceinline__ uint32_t row_tile() const { return ptx::shared_address(shared_); }
  __device__ __forceinline__ uint32_t row_value_tile() const { return row_tile() + kRows * kPitch; }
  __device__ __forceinline__ uint32_t column_tile(int stage) const {
    return row_value_tile() + kRows * kValuePitch + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t column_value_tile(int stage) const {
    return column_tile(stage) + kColumns * kPitch;
  }
  __device__ __forceinline__ uint32_t column_statistics(int stage) const {
    return column_value_tile(stage) + kColumns * kValuePitch;
  }

  // Query and grad_output, or key and value, from row `first` of the sequence.
  template <int kCopied>
  __device__ __forceinline__ void load(bool keys, uint32_t target, uint32_t value_target, int32_t first) {
    const RowTensor& tensor = keys ? arguments_.key : arguments_.query;
    const RowTensor& value_tensor = keys ? arguments_.value : arguments_.grad_output;
    const int32_t head = keys ? key_head() : head_.head;
    const int64_t row = (keys ? head_.first_key : head_.first_query) + first;
    const int32_t left = (keys ? head_.keys : head_.queries) - first;
    load_tile<Element, kCopied, kTile.size, kThreads, kVectors>(
        target, row_of<kFeatures, Element>(tensor, head_.batch, head, row), tensor.row, left, arguments_.size);
    if (!kOfScores && keys) return;  // probabilities do not depend on values
    load_tile<Element, kCopied, kTile.value_size, kThreads, kVectors>(
        value_target, row_of<kFeatures, Element>(value_tensor, head_.batch, head, row), value_tensor.row, left,
        arguments_.value_size);
  }
  __device__ __forceinline__ void load_rows() { load<kRows>(kForKeys, row_tile(), row_value_tile(), first_row_); }
  __device__ __forceinline__ void load_columns(int32_t first, int stage) {
    load<kColumns>(!kForKeys, column_tile(stage), column_value_tile(stage), first);
    const int32_t column = static_cast<int32_t>(threadIdx.x);
    if (kForKeys && column < kColumns) {
      const bool is_inside = first + column < head_.queries;
      ptx::cp_async_ca_shared_global_8_fill(column_statistics(stage) + column * 8,
                                            statistics() + (is_inside ? first + column : 0), is_inside ? 8 : 0);
    }
  }
  __device__ __forceinline__ const QueryStatistics* statistics() const {
    const int64_t tensor = kFeatures.packed ? 0 : head_.batch;
    return arguments_.statistics + (tensor * scores_.heads + head_.head) * scores_.query_tokens + head_.first_query;
  }

  __device__ __forceinline__ void walk() {
    if (kForKeys && first_row_ >= head_.keys) return;  // beyond the batch's length
    const Walk<kFeatures, !kForKeys, kRows, kColumns> walk(scores_, head_, first_row_);
    const DropoutKey dropout = load_dropout<kFeatures>(scores_, head_);
    if constexpr (!kForKeys) load_row_statistics();
    const int32_t count = walk.count();
    __syncthreads();  // everyone is done with the tiles of the head before
    if (count > 0) load_columns(walk.at(0).first, 0);
    ptx::cp_async_commit_group();
    for (int32_t i = 0; i < count; ++i) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      const int stage = kTile.stages == 2 ? i % 2 : 0;
      if (kTile.stages == 2 && i + 1 < count) load_columns(walk.at(i + 1).first, 1 - stage);
      ptx::cp_async_commit_group();
      step(walk.at(i), stage, dropout);
      if (kTile.stages == 1 && i + 1 < count) {
        __syncthreads();
        load_columns(walk.at(i + 1).first, 0);
        ptx::cp_async_commit_group();
      }
    }
    ptx::cp_async_wait_group<0>();
  }

  // Statistics of the queries of elements i and i + 1; i is even.
  __device__ __forceinline__ void statistics_of(int i, int stage, QueryStatistics (&pair)[2]) const {
    if constexpr (kForKeys) {
      const uint32_t column = threadIdx.x % 4 * 2 + i / 4 * 8;
      const ptx::Word4 words = ptx::ld_shared_v4(column_statistics(stage) + column * 8);
      pair[0] = {__uint_as_float(words.x), __uint_as_float(words.y)};
      pair[1] = {__uint_as_float(words.z), __uint_as_float(words.w)};
    } else {
      pair[0] = pair[1] = row_statistics_[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void step(const Step& step, int stage, const DropoutKey& dropout) {
    Accumulator<kColumns> probabilities[1], grads[1];
    float derivatives[kCount];
    const Kept<kCount> kept =
        score_gradients<Toward::kProduct>(probabilities[0], grads[0], derivatives, step, stage, dropout);
    if constexpr (kOfValues) {
      if constexpr (kFeatures.dropout) hide(probabilities[0].values, kept, 0.0f);
      if (first_column_ < kTile.value_size) {
        multiply_fragments<Element, kFeatures.tf32, 1, kSlice, kColumns>(
            second_, probabilities, column_value_tile(stage) + first_column_ * kTile.bytes, kValuePitch);
      }
    }
    if (kOfScores && first_column_ < kTile.size) {
      multiply_fragments<Element, kFeatures.tf32, 1, kSlice, kColumns>(
          first_, grads, column_tile(stage) + first_column_ * kTile.bytes, kPitch);
    }
  }

 protected:
  // From the tiles in shared memory: probabilities before dropout, the gradients of scores (times the derivatives that
  // kToward asks for), and what dropout keeps.
  template <Toward kToward>
  __device__ __forceinline__ Kept<kCount> score_gradients(Accumulator<kColumns>& scores, Accumulator<kColumns>& grads,
                                                          float (&derivatives)[kCount], const Step& step, int stage,
                                                          const DropoutKey& dropout) {
    const Place place = kForKeys ? place_of_thread<kOrientation>(step.first, first_row_, warp_row())
                                 : place_of_thread<kOrientation>(first_row_, step.first, warp_row());
    multiply_tiles<kTile.size>(scores, row_tile() + warp_row() * kPitch, column_tile(stage));
    if constexpr (kOfScores) {
      multiply_tiles<kTile.value_size>(grads, row_value_tile() + warp_row() * kValuePitch, column_value_tile(stage));
    }
    if constexpr (changes_scores(kFeatures)) {
      change_and_derive_scores<kFeatures, Element, kOrientation, kToward>(scores.values, derivatives, scores_, head_,
                                                                          place);
    }
    if (step.is_edge) {
      hide(scores.values, kept_scores<kFeatures, kOrientation, kCount>(scores_, head_, place, step.skips_program),
           tile::minus_infinity());
    }
    Kept<kCount> kept{};
    if constexpr (kFeatures.dropout) {
      kept = kept_by_dropout<kOrientation, kCount>(dropout, place);
#pragma unroll
      for (int i = 0; kOfScores && i < kCount; ++i) grads.values[i] *= kept.at(i) ? scores_.dropout_scale : 0.0f;
    }
    become_probabilities(scores.values, grads.values, stage);
    if constexpr (kOfScores && has_derivative(kFeatures) && kToward != Toward::kCaptured) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) grads.values[i] *= derivatives[i];
    }
    return kept;
  }

  template <int kDepth>
  __device__ __forceinline__ void multiply_tiles(Accumulator<kColumns>& sums, uint32_t rows, uint32_t columns) {
    Accumulator<kColumns> blocks[1];
    blocks[0].clear();
    multiply_by_transpose<Element, kFeatures.tf32, 1, kColumns, kDepth>(blocks, rows, columns);
    sums = blocks[0];
  }

  // Scores to probabilities, gradients of probabilities to those of scores.
  __device__ __forceinline__ void become_probabilities(float (&values)[kCount], float (&grads)[kCount], int stage) {
    const float scale = exponent_scale<kFeatures>(scores_);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      QueryStatistics pair[2];
      statistics_of(i, stage, pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        values[i + j] = ptx::ex2_approx_ftz_f32(values[i + j] * scale - pair[j].lse);
        if constexpr (kOfScores) grads[i + j] = values[i + j] * (grads[i + j] - pair[j].delta);
      }
    }
  }

 private:
  __device__ __forceinline__ void finish() {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();  // even where there was nothing to walk over
    __syncthreads();                // the tiles are done with; each warp writes over its own rows of one
    if constexpr (kForKeys && kFeatures.key_lengths) clear_padding();
    const float scale = scores_.scale, value_scale = kFeatures.dropout ? scores_.dropout_scale : 1.0f;
    if constexpr (kOfScores) {
      store(kForKeys ? arguments_.grad_key : arguments_.grad_query, arguments_.size, first_, scale);
    }
    if constexpr (kOfValues) store(arguments_.grad_value, arguments_.value_size, second_, value_scale);
  }
  // Rows of keys beyond the length that stand in a tile with others.
  __device__ __forceinline__ void clear_padding() {
    const int32_t row = first_row_ + warp_row() + static_cast<int32_t>(threadIdx.x % 32) / 4;
#pragma unroll
    for (int i = 0; i < kSlice / 2; ++i) {
      if (row + i / 2 % 2 * 8 >= head_.keys) first_[0].values[i] = second_[0].values[i] = 0.0f;
    }
  }
  __device__ __forceinline__ void store(const RowTensor& tensor, int32_t columns, const Accumulator<kSlice> (&sums)[1],
                                        float scale) {
    const int32_t row = first_row_ + warp_row();
    if (first_column_ >= columns) return;
    const int32_t head = kForKeys ? key_head() : head_.head;
    const int64_t first = (kForKeys ? head_.first_key : head_.first_query) + row;
    if constexpr (!kIsFloat<Element>) {
      if (!arguments_.float_results) {
        Element* target = row_of<kFeatures, Element>(tensor, head_.batch, head, first) + first_column_;
        store_rows<Element, kSlice, kVectors>(target, tensor.row, rows() - row, columns - first_column_, sums[0],
                                              {scale, scale}, shared_ + warp_row() * kPitch);
        return;
      }
    }
    float* target = row_of<kFeatures, float>(tensor, head_.batch, head, first) + first_column_;
    const float keep = arguments_.accumulates ? 1.0f : 0.0f;
    store_float_rows<kSlice, kVectors>(target, tensor.row, rows() - row, columns - first_column_, sums[0],
                                       {scale, scale}, {keep, keep});
  }

 protected:
  __device__ __forceinline__ void load_row_statistics() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t query = first_row_ + warp_row() + static_cast<int32_t>(threadIdx.x % 32) / 4 + 8 * half;
      row_statistics_[half] = statistics()[least(query, head_.queries - 1)];
    }
  }

  const MmaBackwardArguments& arguments_;
  const ScoreArguments& scores_;
  char* shared_;
  Head head_;
  int32_t first_row_, first_column_;

 private:
  QueryStatistics row_statistics_[2];
  Accumulator<kSlice> first_[1];   // of key or query
  Accumulator<kSlice> second_[1];  // of value
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors, Of kOf>
__global__ void __launch_bounds__(kTile.warps * 32, 1)
    mma_backward(const __grid_constant__ MmaBackwardArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaBackward<kFeatures, Element, kTile, kVectors, kOf>(arguments, shared).run();
}

}  // namespace kernel_pytorch::attention
