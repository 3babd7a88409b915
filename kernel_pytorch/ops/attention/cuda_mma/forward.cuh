// Attention's forward on mma, for every option: a block keeps a tile of queries and walks over the keys that
// it sees, two tiles of keys and values in shared memory; the softmax is the usual online one.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/kept.cuh"
#include "kernel_pytorch/ops/attention/cuda/softmax.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/products.cuh"

namespace kernel_pytorch::attention {

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
class MmaForward {
  static constexpr int kRows = rows_of(kTile), kKeys = kTile.columns, kSlice = kTile.slice;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kBlocks = kTile.row_blocks;
  static constexpr int kQueryPitch = query_pitch(kTile);
  static constexpr int kKeyBytes = kKeys * kQueryPitch, kValueBytes = kKeys * pitch_bytes(kSlice, kTile.bytes);
  static_assert(sizeof(Element) == kTile.bytes);

 public:
  __device__ __forceinline__ MmaForward(const MmaForwardArguments& arguments, char* shared)
      : arguments_(arguments), scores_(arguments.scores), shared_(shared) {
    const int slices = slices_of(kTile.value_size, kSlice);
    int32_t index = static_cast<int32_t>(blockIdx.x);
    first_value_ = index % slices * kSlice;
    index /= slices;
    // The longest rows of a causal head first.
    const UnitTile at = unit_tile<kFeatures>(arguments.places, index, arguments.tiles, true);
    first_query_ = at.tile * kRows;
    head_ = load_head<kFeatures>(scores_, at.unit / scores_.heads, at.unit % scores_.heads);
  }

  __device__ __forceinline__ void run() {
    if (first_query_ >= head_.queries) return;
    load_queries();
    walk();
    finish();
  }

 private:
  __device__ __forceinline__ uint32_t key_tile(int stage) const {
    return ptx::shared_address(shared_) + kRows * kQueryPitch + stage * (kKeyBytes + kValueBytes);
  }
  __device__ __forceinline__ uint32_t value_tile(int stage) const { return key_tile(stage) + kKeyBytes; }
  __device__ __forceinline__ int32_t warp_row() const { return static_cast<int32_t>(threadIdx.x / 32) * 16 * kBlocks; }

  __device__ __forceinline__ void load_queries() {
    const Element* source =
        row_of<kFeatures, Element>(arguments_.query, head_.batch, head_.head, head_.first_query + first_query_);
    load_tile<Element, kRows, kTile.size, kThreads, kVectors>(
        ptx::shared_address(shared_), source, arguments_.query.row, head_.queries - first_query_, arguments_.size);
  }

  __device__ __forceinline__ void load_keys(int32_t first, int stage) {
    const int32_t key_head = head_.head / scores_.group;
    const Element* keys = row_of<kFeatures, Element>(arguments_.key, head_.batch, key_head, head_.first_key + first);
    load_tile<Element, kKeys, kTile.size, kThreads, kVectors>(key_tile(stage), keys, arguments_.key.row,
                                                              head_.keys - first, arguments_.size);
    const Element* values =
        row_of<kFeatures, Element>(arguments_.value, head_.batch, key_head, head_.first_key + first) + first_value_;
    load_tile<Element, kKeys, kSlice, kThreads, kVectors>(value_tile(stage), values, arguments_.value.row,
                                                          head_.keys - first, arguments_.value_size - first_value_);
  }

  __device__ __forceinline__ void walk() {
    const Walk<kFeatures, true, kRows, kKeys> walk(scores_, head_, first_query_);
    const DropoutKey dropout = load_dropout<kFeatures>(scores_, head_);
#pragma unroll
    for (auto& output : output_) output.clear();
    const int32_t count = walk.count();
    if (count > 0) load_keys(walk.at(0).first, 0);
    ptx::cp_async_commit_group();
    for (int32_t i = 0; i < count; ++i) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // tile i has come, and everyone is done with the tile before it
      const int stage = kTile.stages == 2 ? i % 2 : 0;
      if (kTile.stages == 2 && i + 1 < count) load_keys(walk.at(i + 1).first, 1 - stage);
      ptx::cp_async_commit_group();
      step(walk.at(i), stage, dropout);
      if (kTile.stages == 1 && i + 1 < count) {
        __syncthreads();
        load_keys(walk.at(i + 1).first, 0);
        ptx::cp_async_commit_group();
      }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the queries have come for all, even where there was no tile: finish() writes over them
  }

  __device__ __forceinline__ void step(const Step& step, int stage, const DropoutKey& dropout) {
    Accumulator<kKeys> scores[kBlocks];
#pragma unroll
    for (auto& block : scores) block.clear();
    multiply_by_transpose<Element, kFeatures.tf32, kBlocks, kKeys, kTile.size>(
        scores, ptx::shared_address(shared_) + warp_row() * kQueryPitch, key_tile(stage));
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      float(&values)[kKeys / 2] = scores[r].values;
      const Place place = place_of_thread<Rows::kQueries>(first_query_, step.first, warp_row() + 16 * r);
      change_scores<kFeatures, Element, Rows::kQueries>(values, scores_, head_, place);
      if (step.is_edge) {
        hide(values, kept_scores<kFeatures, Rows::kQueries, kKeys / 2>(scores_, head_, place, step.skips_program),
             tile::minus_infinity());
      }
      float rescale[2];
      softmax_[r].add(values, exponent_scale<kFeatures>(scores_), rescale);
      rescale_rows(output_[r].values, rescale);
      if constexpr (kFeatures.dropout) hide(values, kept_by_dropout<Rows::kQueries, kKeys / 2>(dropout, place), 0.0f);
    }
    multiply_fragments<Element, kFeatures.tf32, kBlocks, kSlice, kKeys>(output_, scores, value_tile(stage));
  }

  __device__ __forceinline__ void finish() {
    const float sink = kFeatures.sinks ? scores_.sinks[head_.head * scores_.sinks_stride] * kLog2e : 0.0f;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const int32_t row = first_query_ + warp_row() + 16 * r;
      float factors[2];
      RowResult result =
          softmax_[r].template finish<kFeatures.sinks>(exponent_scale<kFeatures>(scores_), sink, factors);
      if constexpr (kFeatures.dropout) scale_rows(factors, {scores_.dropout_scale, scores_.dropout_scale});
      if constexpr (!kIsFloat<Element>) {
        if (!arguments_.float_results) {
          finish_elements(row, r, result, factors);
          continue;
        }
      }
      finish_floats(row, output_[r], result, factors);
    }
  }

  __device__ __forceinline__ void finish_elements(int32_t row, int r, const RowResult& result,
                                                  const float (&factors)[2]) {
    Element* target =
        row_of<kFeatures, Element>(arguments_.output, head_.batch, head_.head, head_.first_query + row) + first_value_;
    char* own = shared_ + (warp_row() + 16 * r) * kQueryPitch;  // rows of queries that only this warp has read
    store_rows<Element, kSlice, kVectors>(target, arguments_.output.row, head_.queries - row,
                                          arguments_.value_size - first_value_, output_[r], factors, own);
    store_lse(row, result);
  }

  __device__ __forceinline__ float* lse_of_head() const {
    const int64_t tensor = kFeatures.packed ? 0 : head_.batch;
    return arguments_.lse + (tensor * scores_.heads + head_.head) * scores_.query_tokens + head_.first_query;
  }
  __device__ __forceinline__ void store_lse(int32_t row, const RowResult& result) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    if (arguments_.lse == nullptr || first_value_ != 0 || lane % 4 != 0) return;
    for (int half = 0; half < 2; ++half) {
      const int32_t query = row + lane / 4 + 8 * half;
      if (query < head_.queries) lse_of_head()[query] = result.lse[half];
    }
  }

  // Rows in fp32, merged with what other keys gave: log(e^a + e^b), and the share of each in the output.
  __device__ __forceinline__ void finish_floats(int32_t row, const Accumulator<kSlice>& sums, RowResult& result,
                                                float (&factors)[2]) {
    float keep[2] = {};
    if (arguments_.accumulates) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t query = row + static_cast<int32_t>(threadIdx.x % 32) / 4 + 8 * half;
        const float others = query < head_.queries ? lse_of_head()[query] : tile::minus_infinity();
        if (others == tile::minus_infinity()) continue;
        const float base = fmaxf(others, result.lse[half]);
        const float of_these = ptx::ex2_approx_ftz_f32((result.lse[half] - base) * kLog2e);
        const float of_others = ptx::ex2_approx_ftz_f32((others - base) * kLog2e), both = of_these + of_others;
        factors[half] *= of_these / both;
        keep[half] = of_others / both;
        result.lse[half] = base + ptx::lg2_approx_ftz_f32(both) * kLn2;
      }
      __syncwarp();  // all four lanes of a row have read its lse
    }
    float* target =
        row_of<kFeatures, float>(arguments_.output, head_.batch, head_.head, head_.first_query + row) + first_value_;
    store_float_rows<kSlice, kVectors>(target, arguments_.output.row, head_.queries - row,
                                       arguments_.value_size - first_value_, sums, factors, keep);
    store_lse(row, result);
  }

  const MmaForwardArguments& arguments_;
  const ScoreArguments& scores_;
  char* shared_;
  Head head_;
  int32_t first_query_, first_value_;
  Accumulator<kSlice> output_[kBlocks];
  OnlineSoftmax softmax_[kBlocks];
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
__global__ void __launch_bounds__(kTile.warps * 32, 1)
    mma_forward(const __grid_constant__ MmaForwardArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaForward<kFeatures, Element, kTile, kVectors>(arguments, shared).run();
}

}  // namespace kernel_pytorch::attention
