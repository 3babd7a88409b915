// Attention for few queries, bound by the reading of keys and values: a block takes 16 rows and a stretch of the keys,
// its warps take 16 keys each in turn, with pipelines of their own and no barrier, and their results are added at the
// end. kPacks: the rows are the queries of all heads that share a key head, so that keys are read once for the group.
// Stretches of one row are added by a second kernel, in the order of the keys.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/kept.cuh"
#include "kernel_pytorch/ops/attention/cuda/softmax.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/products.cuh"

namespace kernel_pytorch::attention {

// A row of a group of heads: which query and head it is, and its place in the partial results.
struct DecodeRow {
  int32_t query, head;
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors, bool kPacks>
class Decode {
  static constexpr int kPitch = query_pitch(kTile), kValuePitch = value_pitch(kTile);
  static constexpr int kDepths = kTile.size / 16;
  static_assert(sizeof(Element) == kTile.bytes);
  static constexpr int kStages = kTile.stages;

 public:
  __device__ __forceinline__ Decode(const DecodeArguments& arguments, char* shared)
      : arguments_(arguments), forward_(arguments.forward), scores_(arguments.forward.scores), shared_(shared) {
    int32_t index = static_cast<int32_t>(blockIdx.x);
    first_row_ = index % forward_.tiles * kDecodeRows;
    index /= forward_.tiles;
    split_ = index % arguments.splits;
    index /= arguments.splits;
    const int32_t units = kPacks ? scores_.heads / scores_.group : scores_.heads;
    head_ = load_head<kFeatures>(scores_, index / units, index % units * (kPacks ? scores_.group : 1));
  }

  __device__ __forceinline__ void run() {
    if (first_row_ >= rows()) return;
    load_queries();
    walk();
    finish();
  }

 private:
  __device__ __forceinline__ int32_t rows() const { return head_.queries * (kPacks ? scores_.group : 1); }
  __device__ __forceinline__ DecodeRow row_at(int32_t row) const {
    if constexpr (!kPacks) return {row, head_.head};
    return {row / scores_.group, head_.head + row % scores_.group};
  }
  __device__ __forceinline__ int32_t warp() const { return static_cast<int32_t>(threadIdx.x / 32); }
  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ __forceinline__ char* warp_memory(int32_t warp) const {
    constexpr int kBytes = (decode_shared_bytes(kTile) - kDecodeRows * kPitch) / kTile.warps;
    return shared_ + kDecodeRows * kPitch + warp * kBytes;
  }
  __device__ __forceinline__ uint32_t key_tile(int stage) const {
    return ptx::shared_address(warp_memory(warp())) + stage * decode_stage_bytes(kTile);
  }

  // Every warp reads the rows that all share into registers, or, of fp32, again for each product.
  __device__ __forceinline__ void load_queries() {
    for (int32_t row = warp(); row < kDecodeRows; row += kTile.warps) {
      const DecodeRow at = row_at(first_row_ + row);
      const bool is_inside = first_row_ + row < rows();
      const Element* source = row_of<kFeatures, Element>(forward_.query, head_.batch, is_inside ? at.head : 0,
                                                         is_inside ? head_.first_query + at.query : 0);
      load_tile<Element, 1, kTile.size, 32, kVectors>(ptx::shared_address(shared_) + row * kPitch, source, 0,
                                                      is_inside ? 1 : 0, forward_.size, lane());
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (kIsFloat<Element>) return;
    const uint32_t address = ptx::shared_address(shared_) + lane() % 16 * kPitch + lane() / 16 * 16;
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) ptx::ldmatrix_x4(query_[depth], address + depth * 32);
  }

  __device__ __forceinline__ void load_keys(int32_t key, int stage, int32_t last) {
    if (key < last) {
      const int32_t key_head = head_.head / scores_.group;
      const int64_t row = head_.first_key + key;
      load_tile<Element, kDecodeKeys, kTile.size, 32, kVectors>(
          key_tile(stage), row_of<kFeatures, Element>(forward_.key, head_.batch, key_head, row), forward_.key.row,
          head_.keys - key, forward_.size, lane());
      load_tile<Element, kDecodeKeys, kTile.value_size, 32, kVectors>(
          key_tile(stage) + kDecodeKeys * kPitch,
          row_of<kFeatures, Element>(forward_.value, head_.batch, key_head, row), forward_.value.row, head_.keys - key,
          forward_.value_size, lane());
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void walk() {
    const int32_t last_row = least(first_row_ + kDecodeRows, rows()) - 1;
    const TileRange range = keys_of_queries(kFeatures, head_, row_at(first_row_).query, row_at(last_row).query + 1);
    constexpr int32_t kStep = kTile.warps * kDecodeKeys;
    const KeySplit split = decode_split(range, split_, arguments_.splits, arguments_.split_keys, kStep);
    const int32_t first = split.first + warp() * kDecodeKeys, last = split.last;
    const DropoutKey dropout = load_dropout<kFeatures>(scores_, head_);
    output_[0].clear();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_keys(first + i * kStep, i, last);
    int stage = 0;
    for (int32_t key = first; key < last; key += kStep) {
      ptx::cp_async_wait_group<kStages - 2>();
      __syncwarp();  // the tile has come for all lanes, and all are done with the one before it
      load_keys(key + (kStages - 1) * kStep, stage == 0 ? kStages - 1 : stage - 1, last);
      const bool is_inside = key >= range.whole_first && key + kDecodeKeys <= range.whole_last;
      step(key, stage, masks_every_tile(kFeatures) || kFeatures.segments || !is_inside, dropout);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::cp_async_wait_group<0>();
  }

  __device__ __forceinline__ void step(int32_t key, int stage, bool is_edge, const DropoutKey& dropout) {
    constexpr int kCount = kDecodeKeys / 2;
    Accumulator<kDecodeKeys> scores[1];
    scores[0].clear();
    if constexpr (kIsFloat<Element>) {  // whose rows do not fit the registers
      multiply_by_transpose<Element, kFeatures.tf32, 1, kDecodeKeys, kTile.size>(scores, ptx::shared_address(shared_),
                                                                                 key_tile(stage));
    } else {
      const uint32_t keys = key_tile(stage) + (lane() % 8 + lane() / 16 * 8) * kPitch + lane() / 8 % 2 * 16;
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        uint32_t right[4];
        ptx::ldmatrix_x4(right, keys + depth * 32);
        tile::multiply_fragments<Element>(scores[0].group(0), query_[depth], right[0], right[1]);
        tile::multiply_fragments<Element>(scores[0].group(1), query_[depth], right[2], right[3]);
      }
    }
    float(&values)[kCount] = scores[0].values;
    const Place place = place_of_thread<Rows::kQueries>(first_row_, key, 0);
    change_scores<kFeatures, Element, Rows::kQueries>(values, scores_, head_, place);
    if (is_edge) hide(values, kept(place), tile::minus_infinity());
    float rescale[2];
    softmax_.add(values, exponent_scale<kFeatures>(scores_), rescale);
    rescale_rows(output_[0].values, rescale);
    if constexpr (kFeatures.dropout) hide(values, kept_by_dropout<Rows::kQueries, kCount>(dropout, place), 0.0f);
    multiply_fragments<Element, kFeatures.tf32, 1, kTile.value_size, kDecodeKeys>(
        output_, scores, key_tile(stage) + kDecodeKeys * kPitch);
  }

  __device__ __forceinline__ Kept<kDecodeKeys / 2> kept(Place place) const {
    if constexpr (!kPacks) {
      return kept_scores<kFeatures, Rows::kQueries, kDecodeKeys / 2>(scores_, head_, place, false);
    } else {
      Kept<kDecodeKeys / 2> kept;
      keep_keys_in_bounds<kFeatures>(kept, 0, head_, row_at(place.query).query, place.key);
      keep_keys_in_bounds<kFeatures>(kept, 1, head_, row_at(place.query + 8).query, place.key);
      return kept;
    }
  }

  // The warps' results go through shared memory; then 16 rows have blockDim / 16 threads each.
  __device__ __forceinline__ void finish() {
    constexpr int kValues = kTile.value_size + 4;
    float center[2], sum[2];
    softmax_.total(exponent_scale<kFeatures>(scores_), center, sum);
    __syncwarp();
    float* own = reinterpret_cast<float*>(warp_memory(warp()));
#pragma unroll
    for (int i = 0; i < kTile.value_size / 2; ++i) {
      own[tile::fragment_row(lane(), i) * kValues + tile::fragment_column(lane(), i)] = output_[0].values[i];
    }
    if (lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[kDecodeRows * kValues + lane() / 4 + 8 * half] = center[half];
        own[kDecodeRows * kValues + kDecodeRows + lane() / 4 + 8 * half] = sum[half];
      }
    }
    __syncthreads();
    constexpr int kThreads = kTile.warps * 32 / kDecodeRows;
    const int32_t row = static_cast<int32_t>(threadIdx.x) / kThreads,
                  thread = static_cast<int32_t>(threadIdx.x) % kThreads;
    if (first_row_ + row >= rows()) return;
    float weights[kTile.warps], largest = tile::minus_infinity(), total = 0.0f;
#pragma unroll
    for (int i = 0; i < kTile.warps; ++i) {
      weights[i] = reinterpret_cast<const float*>(warp_memory(i))[kDecodeRows * kValues + row];
      largest = fmaxf(largest, weights[i]);
    }
    const float base = largest == tile::minus_infinity() ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < kTile.warps; ++i) {
      weights[i] = ptx::ex2_approx_ftz_f32(weights[i] - base);
      total += weights[i] * reinterpret_cast<const float*>(warp_memory(i))[kDecodeRows * kValues + kDecodeRows + row];
    }
    store(row, thread, kThreads, weights, largest, total);
  }

  __device__ __forceinline__ void store(int32_t row, int32_t thread, int32_t threads,
                                        const float (&weights)[kTile.warps], float largest, float total) {
    constexpr int kValues = kTile.value_size + 4;
    const DecodeRow at = row_at(first_row_ + row);
    const bool is_last = arguments_.partial == nullptr;
    const float sink = kFeatures.sinks ? scores_.sinks[at.head * scores_.sinks_stride] * kLog2e : 0.0f;
    const int64_t tensor = kFeatures.packed ? 0 : head_.batch;
    const int64_t place = (tensor * scores_.heads + at.head) * scores_.query_tokens + head_.first_query + at.query;
    float factor;
    float lse = is_last ? finish_row<kFeatures.sinks>(largest, total, sink, factor)
                        : finish_row<false>(largest, total, 0.0f, factor);
    if (kFeatures.dropout && is_last) factor *= scores_.dropout_scale;
    if (thread == 0 && is_last && forward_.lse != nullptr) forward_.lse[place] = lse;
    if (thread == 0 && !is_last) arguments_.partial_lse[place * arguments_.splits + split_] = lse * kLog2e;
    Element* target = row_of<kFeatures, Element>(forward_.output, head_.batch, at.head, head_.first_query + at.query);
    float* partial =
        is_last ? nullptr : arguments_.partial + (place * arguments_.splits + split_) * forward_.value_size;
    for (int32_t column = thread * 2; column < forward_.value_size; column += threads * 2) {
      float pair[2] = {};
#pragma unroll
      for (int i = 0; i < kTile.warps; ++i) {
        const float* values = reinterpret_cast<const float*>(warp_memory(i)) + row * kValues + column;
        pair[0] += weights[i] * values[0];
        pair[1] += weights[i] * values[1];
      }
      for (int j = 0; j < 2 && column + j < forward_.value_size; ++j) {
        if (is_last) {
          target[column + j] = tile::from_float<Element>(pair[j] * factor);
        } else {
          partial[column + j] = pair[j] * factor;
        }
      }
    }
  }

  const DecodeArguments& arguments_;
  const MmaForwardArguments& forward_;
  const ScoreArguments& scores_;
  char* shared_;
  Head head_;
  int32_t first_row_, split_;
  uint32_t query_[kDepths][4];
  Accumulator<kTile.value_size> output_[1];
  OnlineSoftmax softmax_;
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors, bool kPacks>
__global__ void __launch_bounds__(kTile.warps * 32) decode(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  Decode<kFeatures, Element, kTile, kVectors, kPacks>(arguments, shared).run();
}

// A block for each row: the splits' results weighted by their sums of exponentials. Rows past the last sequence are
// left alone.
template <Features kFeatures, class Element>
__global__ void __launch_bounds__(128) decode_combine(const __grid_constant__ DecodeArguments arguments) {
  const MmaForwardArguments& forward = arguments.forward;
  const ScoreArguments& scores = forward.scores;
  const int32_t heads = scores.heads, queries = scores.queries;
  const int32_t query = static_cast<int32_t>(blockIdx.x) % queries;
  const Head head = load_head<kFeatures>(scores, static_cast<int32_t>(blockIdx.x) / queries / heads,
                                         static_cast<int32_t>(blockIdx.x) / queries % heads);
  if (query >= head.queries) return;
  const int64_t tensor = kFeatures.packed ? 0 : head.batch;
  const int64_t place = (tensor * heads + head.head) * scores.query_tokens + head.first_query + query;
  const float* parts = arguments.partial_lse + place * arguments.splits;
  float largest = tile::minus_infinity(), sum = 0.0f;
  for (int32_t i = 0; i < arguments.splits; ++i) largest = fmaxf(largest, parts[i]);
  const float base = largest == tile::minus_infinity() ? 0.0f : largest;
  for (int32_t i = 0; i < arguments.splits; ++i) sum += ptx::ex2_approx_ftz_f32(parts[i] - base);
  const float sink = kFeatures.sinks ? scores.sinks[head.head * scores.sinks_stride] * kLog2e : 0.0f;
  float factor;
  const float lse = finish_row<kFeatures.sinks>(largest, sum, sink, factor);
  if (kFeatures.dropout) factor *= scores.dropout_scale;
  if (threadIdx.x == 0 && forward.lse != nullptr) forward.lse[place] = lse;
  Element* target = row_of<kFeatures, Element>(forward.output, head.batch, head.head, head.first_query + query);
  const float* partial = arguments.partial + place * arguments.splits * forward.value_size;
  for (int32_t column = static_cast<int32_t>(threadIdx.x); column < forward.value_size; column += 128) {
    float value = 0.0f;
    for (int32_t i = 0; i < arguments.splits; ++i) {
      value +=
          ptx::ex2_approx_ftz_f32(parts[i] - base) * partial[static_cast<int64_t>(i) * forward.value_size + column];
    }
    target[column] = tile::from_float<Element>(value * factor);
  }
}

}  // namespace kernel_pytorch::attention
