// Paged attention for few rows of a key head (decoding, drafts), bound by the reading of keys and values. A block has
// several key heads, whose rows of one key lie next to each other in most caches. Four warps copy (copy.cuh); the
// others multiply, each for its head, its rows and its slice of a step's keys, and keep a softmax of their own.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/copy.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/products.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/rows.cuh"

namespace kernel_pytorch::paged_attention {

inline constexpr int kResultBarrier = 1;
// Of a thread; together what a block has at its launch.
template <Tile kTile>
inline constexpr int kCopyRegisters = kTile.warps == 8 ? 72 : 56;
template <Tile kTile>
inline constexpr int kMultiplyRegisters = kTile.warps == 8 ? 216 : 152;

template <class Element, class Cache, Tile kTile>
class Multiplier : TileRows<Element, Cache, kTile> {
  static constexpr int kRows = tile_rows(kTile), kSlices = slice_count(kTile), kKeys = warp_keys(kTile);
  static constexpr int kRowTiles = kTile.rows / 8, kKeyTiles = kKeys / 16, kOutputTiles = kTile.value_size / 16;
  static constexpr int kDepths = kTile.size / 16;
  static constexpr int kKeyPitch = heads_key_pitch(kTile), kValuePitch = heads_value_pitch(kTile);
  static constexpr uint32_t kAllThere = kKeys < 32 ? (1u << kKeys) - 1 : 0xffffffffu;
  static constexpr int kThreadCount = 32 * kTile.warps;
  using Power = Powers<Element, Cache>;
  using Rows = TileRows<Element, Cache, kTile>;
  using Rows::arguments_, Rows::request_, Rows::first_row_, Rows::first_head_;
  using Rows::lane, Rows::warp, Rows::head, Rows::row_warp, Rows::slice, Rows::row_count, Rows::key_head, Rows::row_at;
  using Rows::largest_, Rows::sum_, Rows::value_scale_, Rows::output_;
  static_assert(sizeof(Cache) == kTile.bytes && kKeys % 16 == 0 && kKeys <= 32 && kSlices >= 1);

 public:
  __device__ __forceinline__ Multiplier(const WorkArguments& work, const Memory<kTile>& memory)
      : Rows(work.attend), memory_(memory) {}

  __device__ __forceinline__ void multiply(const Segment& segment, const Steps& steps, float* piece,
                                           tile::PipelineState& state) {
    request_ = segment.request;
    first_row_ = segment.row_tile * kRows;
    first_head_ = segment.head_group * kTile.heads;
    begin();
    for (int32_t step = steps.first; step < steps.last; ++step) {
      memory_.full(state.stage).wait(state.parity);
      take(steps, step * kTile.keys + slice() * kKeys, state.stage);
      release(state);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) sum_[i][j] = sum_keys(sum_[i][j]);
    }
    if constexpr (kSlices == 1) {
      Rows::store(piece);
    } else {
      memory_.full(state.stage).wait(state.parity);
      float* results = reinterpret_cast<float*>(memory_.stage(state.stage));
      Rows::leave(results);
      ptx::barrier_sync_aligned(kResultBarrier, kThreadCount);
      Rows::store_together(results, piece);
      release(state);
    }
  }

 private:
  __device__ __forceinline__ void release(tile::PipelineState& state) const {
    __syncwarp();
    if (lane() == 0) memory_.empty(state.stage).arrive();
    state.advance(kTile.stages);
  }

  // Over the lanes that hold other keys of the same rows.
  static __device__ __forceinline__ float sum_keys(float value) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }
  static __device__ __forceinline__ float max_keys(float value) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      load_queries(i);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest_[i][j] = tile::minus_infinity();
        sum_[i][j] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
        for (float& value : output_[n][i]) value = 0.0f;
      }
    }
    key_scale_ = value_scale_ = 1.0f;
    if constexpr (kIsCode<Cache>) {
      if (!has_token_scales(arguments_.key)) key_scale_ = scale_at(arguments_.key, 0, 0, key_head(head()));
      if (!has_token_scales(arguments_.value)) value_scale_ = scale_at(arguments_.value, 0, 0, key_head(head()));
    }
  }

  __device__ __forceinline__ void load_queries(int i) {
    const int32_t row = first_row_ + row_warp() * kTile.rows + i * 8 + lane() / 4;
    const Row at = row_at(min(row, row_count() - 1), head());
    const Element* from = static_cast<const Element*>(arguments_.query) +
                          (request_.first_query + at.query) * arguments_.query_token_stride +
                          at.head * arguments_.query_head_stride;
    const int32_t columns = row < row_count() ? arguments_.size : 0;
    float largest = 0.0f;
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int32_t column = query_column<Cache>(lane(), depth, word);
        float pair[2] = {};
        if (column < columns) pair[0] = tile::to_float<Element>(from[column]);
        if (column + 1 < columns) pair[1] = tile::to_float<Element>(from[column + 1]);
        largest = fmaxf(largest, fmaxf(fabsf(pair[0]), fabsf(pair[1])));
        queries_[depth][i][word] = tile::Word<Element>::pack(pair);
      }
    }
    if constexpr (kIsCode<Cache>) fit_queries(i, tile::max_lanes<4>(largest));
  }
  // Queries become fp16 by a power of two that brings the largest of a row to about 2^10.
  __device__ __forceinline__ void fit_queries(int i, float largest) {
    const int32_t exponent = min(max(static_cast<int32_t>(__float_as_uint(largest) >> 23) - 127, -100), 127);
    const float factor = __uint_as_float(static_cast<uint32_t>(10 - exponent + 127) << 23);
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
      for (uint32_t& word : queries_[depth][i]) {
        float pair[2];
        tile::Word<Element>::unpack(word, pair);
        pair[0] *= factor;
        pair[1] *= factor;
        word = tile::Word<tile::Float16>::pack(pair);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      query_factor_[i][j] = __shfl_sync(0xffffffffu, 1.0f / factor, (lane() % 4 * 2 + j) * 4);
    }
  }

  __device__ __forceinline__ void take(const Steps& steps, int32_t first_key, int stage) {
    float scores[kKeyTiles][kRowTiles][4] = {};
    const int32_t place = slice() * kKeys;
    const uint32_t there = __ballot_sync(0xffffffffu, memory_.presence(stage)[place + lane() % kKeys]) & kAllThere;
    const uint32_t keys =
        memory_.rows(stage) + place * kKeyPitch + head() * kTile.size * static_cast<int>(sizeof(Cache));
    multiply_keys_by_rows<Element, Cache, kKeys, kTile.rows, kTile.size, kKeyPitch>(scores, keys, queries_);
    change(scores, stage, first_key);
    const bool is_edge = arguments_.mask != nullptr || there != kAllThere || first_key < steps.all_first ||
                         first_key + kKeys > steps.all_last;
    if (is_edge) hide(scores, there, first_key);
    soften(scores);
    if constexpr (kIsCode<Cache>) {
      if (has_token_scales(arguments_.value)) scale_by_keys(scores, memory_.scales(stage, 1));
    }
    const uint32_t values = memory_.rows(stage) + kTile.keys * kKeyPitch + place * kValuePitch +
                            head() * kTile.value_size * static_cast<int>(sizeof(Cache));
    multiply_values_by_rows<Element, Cache, kKeys, kTile.rows, kTile.value_size, kValuePitch>(output_, scores, values);
  }

  // The place of a key among the warp's.
  __device__ __forceinline__ int32_t key_place(int k, int index) const {
    return k * 16 + lane() / 4 + index / 2 * 8;
  }
  template <class Body>
  __device__ __forceinline__ void for_each_score(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int index = 0; index < 4; ++index) body(k, i, index);
      }
    }
  }
  using Scores = float[kKeyTiles][kRowTiles][4];

  __device__ __forceinline__ void scale_by_keys(Scores& scores, const float* scales) const {
    for_each_score([&](int k, int i, int index) {
      scores[k][i][index] *= scales[(slice() * kKeys + key_place(k, index)) * kTile.heads + head()];
    });
  }

  // Scores to base 2.
  __device__ __forceinline__ void change(Scores& scores, int stage, int32_t first_key) const {
    const float scale = arguments_.scale * key_scale_;
    if constexpr (kIsCode<Cache>) {
      if (has_token_scales(arguments_.key)) scale_by_keys(scores, memory_.scales(stage, 0));
      for_each_score([&](int k, int i, int index) { scores[k][i][index] *= query_factor_[i][index % 2]; });
    }
    if (arguments_.softcap <= 0.0f && arguments_.alibi_slopes == nullptr) {
      for_each_score([&](int k, int i, int index) { scores[k][i][index] *= scale * tile::kLog2E; });
      return;
    }
    for_each_score([&](int k, int i, int index) {
      const Row row = Rows::own_row_at(i, index % 2);
      float score = scores[k][i][index] * scale;
      if (arguments_.softcap > 0.0f) score = arguments_.softcap * tanhf(score / arguments_.softcap);
      if (arguments_.alibi_slopes != nullptr) {
        const int32_t distance = first_key + key_place(k, index) - request_.position(row.query);
        score -= arguments_.alibi_slopes[row.head] * fabsf(static_cast<float>(distance));
      }
      scores[k][i][index] = score * tile::kLog2E;
    });
  }

  __device__ __forceinline__ void hide(Scores& scores, uint32_t there, int32_t first_key) const {
    for_each_score([&](int k, int i, int index) {
      const int32_t query = Rows::own_row_at(i, index % 2).query, key = first_key + key_place(k, index);
      const KeyRange range = keys_seen(arguments_, request_, request_.position(query));
      bool is_kept = (there >> key_place(k, index) & 1) != 0 && key >= range.first && key < range.last;
      if (is_kept) is_kept = !is_masked(arguments_, request_, query, key);
      if (!is_kept) scores[k][i][index] = tile::minus_infinity();
    });
  }

  // Scores become weights; those of codes carry their power of two.
  __device__ __forceinline__ void soften(Scores& scores) {
    constexpr float kShift = kIsCode<Cache> && Power::kIsWide ? 100.0f : 0.0f;
    float rescale[kRowTiles][2];
    bool changes = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float largest = fmaxf(scores[0][i][j], scores[0][i][j + 2]);
#pragma unroll
        for (int k = 1; k < kKeyTiles; ++k) largest = fmaxf(largest, fmaxf(scores[k][i][j], scores[k][i][j + 2]));
        largest = fmaxf(largest_[i][j], max_keys(largest));
        const float base = largest == tile::minus_infinity() ? 0.0f : largest;
        rescale[i][j] = ptx::ex2_approx_ftz_f32(largest_[i][j] - base);
        changes = changes || rescale[i][j] != 1.0f;
        largest_[i][j] = largest;
        sum_[i][j] *= rescale[i][j];
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k) {
#pragma unroll
          for (int index = j; index < 4; index += 2) {
            scores[k][i][index] = ptx::ex2_approx_ftz_f32(scores[k][i][index] - (base - kShift));
            sum_[i][j] += scores[k][i][index];
          }
        }
      }
    }
    if (!__any_sync(0xffffffffu, changes)) return;
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int index = 0; index < 4; ++index) output_[n][i][index] *= rescale[i][index % 2];
      }
    }
  }

  const Memory<kTile>& memory_;
  float key_scale_;
  float query_factor_[kIsCode<Cache> ? kRowTiles : 1][2];  // puts back what queries were multiplied with
  uint32_t queries_[kDepths][kRowTiles][2];
};

template <class Element, class Cache, Tile kTile>
__global__ void __launch_bounds__(32 * (kTile.warps + kCopyWarps), 1)
    attend_heads(const __grid_constant__ WorkArguments work) {
  extern __shared__ __align__(16) char shared[];
  const Memory<kTile> memory{shared};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTile.stages; ++i) {
      // What every warp writes, and, but for runs, every lane's copies.
      memory.full(i).init(work.has_runs ? kCopyWarps : 33 * kCopyWarps);
      memory.empty(i).init(kTile.warps);
    }
  }
  tile::wait_for_earlier_kernels();
  tile::let_next_kernel_start();
  const int64_t* plan = plan_of<kTile>(work, memory.plan());
  __syncthreads();
  tile::PipelineState state;
  if (threadIdx.x / 32 >= kTile.warps) {
    ptx::setmaxnreg_dec<kCopyRegisters<kTile>>();
    Copier<Cache, kTile> copier(work, memory);
    for_each_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float*) {
      copier.copy(segment, steps, state);
      if constexpr (slice_count(kTile) > 1) copier.lend(state);
    });
  } else {
    ptx::setmaxnreg_inc<kMultiplyRegisters<kTile>>();
    Multiplier<Element, Cache, kTile> multiplier(work, memory);
    for_each_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float* piece) {
      multiplier.multiply(segment, steps, piece, state);
    });
  }
}

}  // namespace kernel_pytorch::paged_attention
