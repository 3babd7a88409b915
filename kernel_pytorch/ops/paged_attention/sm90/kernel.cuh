// Paged attention for few rows of a key head (decoding, drafts), bound by the reading of keys and values. A block has
// several key heads: rows of one key lie next to each other in most caches, and reading them at different times opens
// the same row of the memory chip again and again (NOTES.md). Four warps copy (copy.cuh); the others multiply, each for
// its head, its 16 rows and its slice of a step's keys.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/products.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/copy.cuh"

namespace kernel_pytorch::paged_attention {

inline constexpr int kResultBarrier = 1, kPieceBarrier = 2, kCopyRegisters = 72, kMultiplyRegisters = 216;

template <class Element, class Cache, Tile kTile>
class Multiplier {
  static constexpr int kRows = tile_rows(kTile), kSlices = slice_count(kTile), kKeys = warp_keys(kTile);
  static constexpr int kDepths = kTile.size / 16, kScores = kKeys / 2, kOutputs = kTile.value_size / 2;
  static constexpr int kKeyPitch = heads_key_pitch(kTile), kValuePitch = heads_value_pitch(kTile);
  static constexpr uint32_t kAllThere = kKeys < 32 ? (1u << kKeys) - 1 : 0xffffffffu;
  static constexpr int kThreadCount = 32 * kTile.warps;
  using Power = Powers<Element, Cache>;
  static_assert(sizeof(Cache) == kTile.bytes && kKeys % 16 == 0 && kKeys <= 32 && kSlices >= 1);

 public:
  __device__ __forceinline__ Multiplier(const WorkArguments& work, const Memory<kTile>& memory)
      : arguments_(work.attend), memory_(memory) {}

  __device__ __forceinline__ void multiply(const Segment& segment, const Steps& steps, float* piece,
                                           tile::PipelineState& state) {
    request_ = segment.request;
    first_row_ = segment.row_tile * kRows;
    first_head_ = segment.head_group * kTile.heads;
    begin();
    load_queries();
    for (int32_t step = steps.first; step < steps.last; ++step) {
      memory_.full(state.stage).wait(state.parity);
      take(steps, step * kTile.keys + slice() * kKeys, state.stage);
      __syncwarp();
      if (lane() == 0) memory_.empty(state.stage).arrive();
      state.advance(kTile.stages);
    }
    sum_[0] = tile::sum_lanes<4>(sum_[0]);
    sum_[1] = tile::sum_lanes<4>(sum_[1]);
    if constexpr (kSlices == 1) {
      store(piece);
    } else {
      meet();
      store_met(piece);
      ptx::barrier_sync_aligned(kPieceBarrier, kThreadCount + 32 * kCopyWarps);  // the next copies may overwrite the results
    }
  }

 private:
  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ __forceinline__ int32_t warp() const { return static_cast<int32_t>(threadIdx.x / 32); }
  __device__ __forceinline__ int32_t head() const { return warp() % kTile.heads; }
  __device__ __forceinline__ int32_t row_warp() const { return warp() / kTile.heads % kTile.row_warps; }
  __device__ __forceinline__ int32_t slice() const { return warp() / (kTile.heads * kTile.row_warps); }

  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(arguments_.group_divider.divisor); }
  __device__ __forceinline__ int32_t row_count() const { return request_.queries * group(); }
  __device__ __forceinline__ int32_t key_head(int32_t head) const { return first_head_ + head; }
  __device__ __forceinline__ Row row_at(int32_t row, int32_t head) const {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments_.group_divider));
    return {query, key_head(head) * group() + row - query * group()};
  }
  // Of the rows of this lane's accumulators.
  __device__ __forceinline__ int32_t own_row(int half) const {
    return first_row_ + row_warp() * 16 + lane() / 4 + 8 * half;
  }
  __device__ __forceinline__ Row last_row_at(int half) const {
    return row_at(min(own_row(half), row_count() - 1), head());
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest_[half] = tile::minus_infinity();
      sum_[half] = 0.0f;
    }
#pragma unroll
    for (float& value : output_) value = 0.0f;
    key_scale_ = value_scale_ = 1.0f;
    if constexpr (kIsCode<Cache>) {
      if (!has_token_scales(arguments_.key)) key_scale_ = scale_at(arguments_.key, 0, 0, key_head(head()));
      if (!has_token_scales(arguments_.value)) value_scale_ = scale_at(arguments_.value, 0, 0, key_head(head()));
    }
  }

  // Of codes, four neighbours are a thread's, as they are in a word of codes.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = own_row(half);
      const Row at = last_row_at(half);
      const Element* from = static_cast<const Element*>(arguments_.query) +
                            (request_.first_query + at.query) * arguments_.query_token_stride +
                            at.head * arguments_.query_head_stride;
      const int32_t columns = row < row_count() ? arguments_.size : 0;
#pragma unroll
      for (int i = 0; i < 2 * kDepths; ++i) {
        const int32_t column = i / 2 * 16 + (kIsCode<Cache> ? lane() % 4 * 4 + i % 2 * 2 : lane() % 4 * 2 + i % 2 * 8);
        float pair[2] = {};
        if (column < columns) pair[0] = tile::to_float<Element>(from[column]) * Power::kQuery;
        if (column + 1 < columns) pair[1] = tile::to_float<Element>(from[column + 1]) * Power::kQuery;
        fragment_[i / 2][i % 2 * 2 + half] = tile::Word<Element>::pack(pair);
      }
    }
  }

  __device__ __forceinline__ void take(const Steps& steps, int32_t first_key, int stage) {
    float scores[kScores];
#pragma unroll
    for (float& score : scores) score = 0.0f;
    const uint32_t keys =
        memory_.rows(stage) + slice() * kKeys * kKeyPitch + head() * kTile.size * static_cast<int>(sizeof(Cache));
    multiply_keys<Element, Cache, kKeys, kTile.size, kKeyPitch>(scores, keys,
                                                                [&](uint32_t(&fragment)[4], int depth) {
#pragma unroll
                                                                  for (int i = 0; i < 4; ++i)
                                                                    fragment[i] = fragment_[depth][i];
                                                                });
    change(scores, stage, first_key);
    const int32_t place = slice() * kKeys;
    const uint32_t there =
        __ballot_sync(0xffffffffu, memory_.presence(stage)[place + lane() % kKeys]) & kAllThere;
    const bool is_edge = arguments_.mask != nullptr || there != kAllThere || first_key < steps.all_first ||
                         first_key + kKeys > steps.all_last;
    if (is_edge) hide(scores, there, first_key);
    soften(scores);
    if constexpr (kIsCode<Cache>) {
      const bool has_own = has_token_scales(arguments_.value);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int32_t key = place + tile::fragment_column(lane(), i);
        scores[i] *= (has_own ? memory_.scales(stage, 1)[key * kTile.heads + head()] : 1.0f) * Power::kWeight;
      }
    }
    const uint32_t values = memory_.rows(stage) + kTile.keys * kKeyPitch + slice() * kKeys * kValuePitch +
                            head() * kTile.value_size * static_cast<int>(sizeof(Cache));
    multiply_values<Element, Cache, kKeys, kTile.value_size, kValuePitch>(output_, scores, values);
  }

  // Scores to base 2.
  __device__ __forceinline__ void change(float (&scores)[kScores], int stage, int32_t first_key) {
    const float scale = arguments_.scale * Power::kScore * key_scale_;
    if constexpr (kIsCode<Cache>) {
      if (has_token_scales(arguments_.key)) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const int32_t key = slice() * kKeys + tile::fragment_column(lane(), i);
          scores[i] *= memory_.scales(stage, 0)[key * kTile.heads + head()];
        }
      }
    }
    if (arguments_.softcap <= 0.0f && arguments_.alibi_slopes == nullptr) {
#pragma unroll
      for (float& score : scores) score *= scale * tile::kLog2E;
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = last_row_at(half);
      const int32_t position = request_.position(row.query);
      const float slope = arguments_.alibi_slopes == nullptr ? 0.0f : arguments_.alibi_slopes[row.head];
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 2 % 2 != half) continue;
        float score = scores[i] * scale;
        if (arguments_.softcap > 0.0f) score = arguments_.softcap * tanhf(score / arguments_.softcap);
        const int32_t key = first_key + tile::fragment_column(lane(), i);
        scores[i] = (score - slope * fabsf(static_cast<float>(key - position))) * tile::kLog2E;
      }
    }
  }

  __device__ __forceinline__ void hide(float (&scores)[kScores], uint32_t there, int32_t first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t query = last_row_at(half).query;
      const KeyRange range = keys_seen(arguments_, request_, request_.position(query));
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i / 2 % 2 != half) continue;
        const int place = tile::fragment_column(lane(), i);
        const int32_t key = first_key + place;
        bool is_kept = (there >> place & 1) != 0 && key >= range.first && key < range.last;
        if (is_kept) is_kept = !is_masked(arguments_, request_, query, key);
        if (!is_kept) scores[i] = tile::minus_infinity();
      }
    }
  }

  // Scores become weights.
  __device__ __forceinline__ void soften(float (&scores)[kScores]) {
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = tile::minus_infinity();
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
      largest = fmaxf(largest_[half], tile::max_lanes<4>(largest));
      const float base = largest == tile::minus_infinity() ? 0.0f : largest;
      rescale[half] = ptx::ex2_approx_ftz_f32(largest_[half] - base);
      largest_[half] = largest;
      sum_[half] *= rescale[half];
#pragma unroll
      for (int i = 2 * half; i < kScores; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          scores[j] = ptx::ex2_approx_ftz_f32(scores[j] - base);
          sum_[half] += scores[j];
        }
      }
    }
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output_[i] *= rescale[i / 2 % 2];
    }
  }

  // One row of the result: where it goes, and what its values are multiplied with.
  struct Target {
    Element* output;
    float* piece;
    float factor;

    __device__ __forceinline__ void store(int32_t column, float value) const {
      if (piece == nullptr) {
        output[column] = tile::from_float<Element>(value * factor);
      } else {
        piece[column] = value * factor;
      }
    }
  };
  __device__ __forceinline__ Target target_of(float* piece, int32_t row, int32_t head, float largest, float sum,
                                              float value_scale, bool leads) const {
    constexpr int kAllRows = kTile.heads * kRows;
    const Row at = row_at(row, head);
    const int32_t token = request_.first_query + at.query;
    Target target{static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                      at.head * arguments_.output_head_stride,
                  nullptr, 1.0f};
    if (piece == nullptr) {
      const float lse = finish_row(arguments_, at.head, largest, sum, target.factor);
      if (leads && arguments_.lse != nullptr) arguments_.lse[at.head * arguments_.tokens + token] = lse;
    } else {
      const int32_t place = head * kRows + row - first_row_;
      target.piece = piece + place * kTile.value_size;
      if (leads) {
        piece[kAllRows * kTile.value_size + place] = largest;
        piece[kAllRows * (kTile.value_size + 1) + place] = sum;
      }
    }
    target.factor *= Power::kOutput * value_scale;
    return target;
  }

  __device__ __forceinline__ void store(float* piece) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own_row(half) >= row_count()) continue;
      const Target target =
          target_of(piece, own_row(half), head(), largest_[half], sum_[half], value_scale_, lane() % 4 == 0);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (i / 2 % 2 != half) continue;
        const int32_t column = value_column<Cache>(lane(), i);
        if (column < arguments_.value_size) target.store(column, output_[i]);
      }
    }
  }

  __device__ __forceinline__ float* result_of(int warp) const {
    return reinterpret_cast<float*>(memory_.stages()) + warp * 16 * (kTile.value_size + 4 + 2);
  }
  // Every warp leaves its rows where all can read them, in place of keys that all are done with.
  __device__ __forceinline__ void meet() const {
    ptx::barrier_sync_aligned(kResultBarrier, kThreadCount);
    float* own = result_of(warp());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane() / 4 + 8 * half;
      if (lane() % 4 == 0) {
        own[16 * (kTile.value_size + 4) + row] = largest_[half];
        own[16 * (kTile.value_size + 5) + row] = sum_[half];
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      own[tile::fragment_row(lane(), i) * (kTile.value_size + 4) + value_column<Cache>(lane(), i)] = output_[i];
    }
    ptx::barrier_sync_aligned(kResultBarrier, kThreadCount);
  }
  __device__ __forceinline__ void store_met(float* piece) const {
    constexpr int kOthers = kTile.heads * kTile.row_warps, kRowThreads = 2 * kSlices;
    const int32_t index = static_cast<int32_t>(threadIdx.x) / kRowThreads,
                  thread = static_cast<int32_t>(threadIdx.x) % kRowThreads;
    const int32_t first_warp = index / 16, place = index % 16, head = first_warp % kTile.heads;
    const int32_t row = first_row_ + first_warp / kTile.heads * 16 + place;
    if (row >= row_count()) return;
    float weights[kSlices], largest = tile::minus_infinity(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      weights[i] = result_of(first_warp + i * kOthers)[16 * (kTile.value_size + 4) + place];
      largest = fmaxf(largest, weights[i]);
    }
    const float base = largest == tile::minus_infinity() ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      weights[i] = ptx::ex2_approx_ftz_f32(weights[i] - base);
      sum += weights[i] * result_of(first_warp + i * kOthers)[16 * (kTile.value_size + 5) + place];
    }
    float value_scale = 1.0f;
    if constexpr (kIsCode<Cache>) {
      if (!has_token_scales(arguments_.value)) value_scale = scale_at(arguments_.value, 0, 0, key_head(head));
    }
    const Target target = target_of(piece, row, head, largest, sum, value_scale, thread == 0);
    for (int32_t column = thread; column < arguments_.value_size; column += kRowThreads) {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        value += weights[i] * result_of(first_warp + i * kOthers)[place * (kTile.value_size + 4) + column];
      }
      target.store(column, value);
    }
  }

  const AttendArguments& arguments_;
  const Memory<kTile>& memory_;
  Request request_;
  int32_t first_row_, first_head_;
  float largest_[2], sum_[2], key_scale_, value_scale_;
  uint32_t fragment_[kDepths][4];
  float output_[kOutputs];
};

template <class Element, class Cache, Tile kTile>
__global__ void __launch_bounds__(32 * (kTile.warps + kCopyWarps), 1) attend_heads(
    const __grid_constant__ WorkArguments work) {
  extern __shared__ __align__(16) char shared[];
  const Memory<kTile> memory{shared};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTile.stages; ++i) {
      memory.full(i).init(33 * kCopyWarps);  // every lane's copies, and what every warp writes
      memory.empty(i).init(kTile.warps);
    }
  }
  tile::wait_for_earlier_kernels();
  tile::let_next_kernel_start();
  const int64_t* plan = plan_of<kTile>(work, memory.plan());
  __syncthreads();
  tile::PipelineState state;
  if (threadIdx.x / 32 >= kTile.warps) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    Copier<Cache, kTile> copier(work, memory);
    for_each_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float*) {
      copier.copy(segment, steps, state);
      if constexpr (slice_count(kTile) > 1) {
        ptx::barrier_sync_aligned(kPieceBarrier, 32 * (kTile.warps + kCopyWarps));
      }
    });
  } else {
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    Multiplier<Element, Cache, kTile> multiplier(work, memory);
    for_each_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float* piece) {
      multiplier.multiply(segment, steps, piece, state);
    });
  }
}

}  // namespace kernel_pytorch::paged_attention
