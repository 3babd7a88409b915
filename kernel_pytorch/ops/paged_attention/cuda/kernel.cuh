// Paged attention by tensor cores (mma.m16n8k16). A constant number of workers shares the steps of all requests evenly,
// whatever their lengths (arguments_cuda.h says how), so one CUDA graph serves every step of decoding. A block copies
// keys and values of 64 tokens at a time, page by page, three steps ahead; each warp takes some of the keys (or some of
// the rows, where there are more than 16) and keeps its own softmax; warps meet when a piece is done.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/products.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/work.cuh"

namespace kernel_pytorch::paged_attention {

template <class Element, class Cache, Tile kTile>
class Attention {
  // The warps that work on the same keys are a team, which copies its keys by itself: teams never wait for each other.
  static constexpr int kRows = tile_rows(kTile), kTeams = kWarps / kTile.row_warps;
  static constexpr int kTeamThreads = 32 * kTile.row_warps, kTeamKeys = kTile.keys / kTeams, kStages = kTile.stages;
  static constexpr int kDepths = kTile.size / 16, kKeyPitch = key_pitch(kTile), kValuePitch = value_pitch(kTile);
  static constexpr int kScores = kTeamKeys / 2, kOutputs = kTile.value_size / 2;
  static constexpr int kWords = (kTeamKeys + 31) / 32;  // of bits that say which keys are there
  static constexpr uint32_t kAllThere = kTeamKeys < 32 ? (1u << kTeamKeys) - 1 : 0xffffffffu;
  static constexpr bool kKeepsQueries = kTile.size <= 192;  // in registers; larger ones are read again for each step
  using Power = Powers<Element, Cache>;
  static_assert(sizeof(Cache) == kTile.bytes && 2 * kTeamKeys == kTeamThreads);

 public:
  __device__ __forceinline__ Attention(const WorkArguments& work, char* shared)
      : work_(work), arguments_(work.attend), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const Workers workers(work_, work_.plan);
    for (int64_t worker = blockIdx.x; worker < workers.count; worker += gridDim.x) {
      const int64_t end = workers.begin(worker + 1);
      segment_ = segment_of<kTile>(work_, work_.plan, workers.begin(worker));
      for (int64_t unit = workers.begin(worker); unit < end;) {
        const int64_t after = segment_.first_unit + segment_.units, last = after < end ? after : end;
        begin_piece(static_cast<int32_t>(unit - segment_.first_unit), static_cast<int32_t>(last - segment_.first_unit));
        load_queries();
        walk();
        meet();
        const bool is_whole = unit == segment_.first_unit && last == after;
        store(is_whole ? nullptr : piece_at<kTile>(work_, place_of_piece(work_, workers, worker, segment_.first_unit)));
        __syncthreads();  // before memory is used for another piece
        unit = last;
        if (unit < end) next_segment<kTile>(work_, segment_);
      }
    }
  }

 private:
  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ __forceinline__ int32_t row_warp() const { return static_cast<int32_t>(threadIdx.x / 32) / kTeams; }
  __device__ __forceinline__ int32_t team() const { return static_cast<int32_t>(threadIdx.x / 32) % kTeams; }
  __device__ __forceinline__ int32_t team_thread() const { return row_warp() * 32 + lane(); }
  __device__ __forceinline__ void meet_team() const {
    if constexpr (kTile.row_warps == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync_aligned(1 + team(), kTeamThreads);
    }
  }
  __device__ __forceinline__ char* queries() const { return shared_; }
  __device__ __forceinline__ char* slots() const { return shared_ + kRows * query_pitch(kTile); }
  __device__ __forceinline__ char* slot(int index) const {
    return slots() + (team() * slot_count(kTile) + index) * slot_bytes(kTile);
  }
  __device__ __forceinline__ char* stages() const { return slots() + kTeams * slot_count(kTile) * slot_bytes(kTile); }
  __device__ __forceinline__ uint32_t stage(int32_t step) const {
    return ptx::shared_address(stages()) + (team() * kStages + step % kStages) * stage_bytes(kTile);
  }
  __device__ __forceinline__ int64_t* key_offsets(int index) const { return reinterpret_cast<int64_t*>(slot(index)); }
  __device__ __forceinline__ int64_t* value_offsets(int index) const { return key_offsets(index) + kTeamKeys; }
  __device__ __forceinline__ float* key_scales(int index) const {
    return reinterpret_cast<float*>(value_offsets(index) + kTeamKeys);
  }
  __device__ __forceinline__ float* value_scales(int index) const { return key_scales(index) + kTeamKeys; }
  __device__ __forceinline__ uint32_t* presence(int index) const {
    return reinterpret_cast<uint32_t*>(value_scales(index) + kTeamKeys);
  }

  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(arguments_.group_divider.divisor); }
  __device__ __forceinline__ int32_t row_count() const { return segment_.request.queries * group(); }
  __device__ __forceinline__ Row row_at(int32_t row) const {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments_.group_divider));
    return {query, segment_.head_group * group() + row - query * group()};
  }

  // The steps of a piece: those of its units that some row of the tile sees.
  __device__ __forceinline__ void begin_piece(int32_t first_unit, int32_t last_unit) {
    first_row_ = segment_.row_tile * kRows;
    const int32_t last_row = min(first_row_ + kRows, row_count()) - 1;
    const KeyRange oldest =
        keys_seen(arguments_, segment_.request, segment_.request.position(row_at(first_row_).query));
    const KeyRange newest = keys_seen(arguments_, segment_.request, segment_.request.position(row_at(last_row).query));
    // Keys that all rows see: no tile inside has to look at bounds.
    all_first_ = newest.first;
    all_last_ = min(oldest.last, newest.last);
    const int32_t start = oldest.first / kTile.keys,
                  end = (max(oldest.last, newest.last) + kTile.keys - 1) / kTile.keys;
    first_step_ = min(end, start + first_unit * work_.unit_tiles);
    last_step_ = min(end, start + last_unit * work_.unit_tiles);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row = row_at(min(first_row_ + row_warp() * 16 + lane() / 4 + 8 * half, last_row));
      query_[half] = row.query;
      position_[half] = segment_.request.position(row.query);
      range_[half] = keys_seen(arguments_, segment_.request, position_[half]);
      slope_[half] = arguments_.alibi_slopes == nullptr ? 0.0f : arguments_.alibi_slopes[row.head];
      largest_[half] = tile::minus_infinity();
      sum_[half] = 0.0f;
    }
#pragma unroll
    for (float& value : output_) value = 0.0f;
  }

  __device__ __forceinline__ void load_queries() {
    constexpr int kPairs = kTile.size / 2;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kPairs; i += kThreads) {
      const int32_t row = first_row_ + i / kPairs, column = i % kPairs * 2;
      float pair[2] = {};
      if (row < row_count()) {
        const Row at = row_at(row);
        const Element* from = static_cast<const Element*>(arguments_.query) +
                              (segment_.request.first_query + at.query) * arguments_.query_token_stride +
                              at.head * arguments_.query_head_stride;
        if (column < arguments_.size) pair[0] = tile::to_float<Element>(from[column]) * Power::kQuery;
        if (column + 1 < arguments_.size) pair[1] = tile::to_float<Element>(from[column + 1]) * Power::kQuery;
      }
      *reinterpret_cast<uint32_t*>(queries() + i / kPairs * query_pitch(kTile) + column * 2) =
          tile::Word<Element>::pack(pair);
    }
    __syncthreads();
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) load_fragment(fragment_[depth], depth);
    }
  }
  __device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], int depth) const {
    const char* rows = queries() + row_warp() * 16 * query_pitch(kTile);
    if constexpr (kIsCode<Cache>) {  // four neighbours are a thread's, as they are in a word of codes
      const char* from = rows + lane() / 4 * query_pitch(kTile) + (depth * 16 + lane() % 4 * 4) * 2;
      fragment[0] = *reinterpret_cast<const uint32_t*>(from);
      fragment[1] = *reinterpret_cast<const uint32_t*>(from + 8 * query_pitch(kTile));
      fragment[2] = *reinterpret_cast<const uint32_t*>(from + 4);
      fragment[3] = *reinterpret_cast<const uint32_t*>(from + 8 * query_pitch(kTile) + 4);
    } else {
      ptx::ldmatrix_x4(fragment,
                       ptx::shared_address(rows) + lane() % 16 * query_pitch(kTile) + lane() / 16 * 16 + depth * 32);
    }
  }

  // Threads of a team's first half find keys, those of the second half values.
  __device__ __forceinline__ int32_t own_key(int32_t step) const {
    return step * kTile.keys + team() * kTeamKeys + team_thread() % kTeamKeys;
  }
  __device__ __forceinline__ int32_t load_page(int32_t step) const {
    const int32_t key = own_key(step);
    return step < last_step_ && key < segment_.request.keys ? page_of(arguments_, segment_.request, key) : -1;
  }
  __device__ __forceinline__ void keep_offset(int32_t step, int32_t page) {
    const int index = step % slot_count(kTile);
    const bool is_value = team_thread() >= kTeamKeys;
    const CacheArguments& cache = is_value ? arguments_.value : arguments_.key;
    const int32_t place = team_thread() % kTeamKeys, row = row_in_page(arguments_, own_key(step));
    (is_value ? value_offsets(index) : key_offsets(index))[place] =
        page < 0 ? -1 : offset_in(cache, page, row, segment_.head_group);
    if constexpr (kIsCode<Cache>) {
      (is_value ? value_scales(index) : key_scales(index))[place] =
          page < 0 ? 0.0f : scale_at(cache, page, row, segment_.head_group);
    }
    const uint32_t bits = __ballot_sync(0xffffffffu, page >= 0);
    if (!is_value && lane() == 0) presence(index)[place / 32] = bits & kAllThere;
  }

  template <int kColumns, int kPitch>
  __device__ __forceinline__ void copy_rows(const void* data, const int64_t* offsets, int32_t columns, uint32_t to) {
    constexpr int kUnits = kColumns * sizeof(Cache) / 16;
#pragma unroll
    for (int i = team_thread(); i < kTeamKeys * kUnits; i += kTeamThreads) {
      const int row = i / kUnits, unit = i % kUnits;
      const int64_t offset = offsets[row];
      const char* from = static_cast<const char*>(data) + offset * static_cast<int64_t>(sizeof(Cache)) + unit * 16;
      const int32_t bytes = columns * static_cast<int32_t>(sizeof(Cache)) - unit * 16;
      ptx::cp_async_cg_shared_global_16_fill(to + row * kPitch + unit * 16, offset < 0 ? data : from,
                                             offset < 0 ? 0 : max(0, min(16, bytes)));
    }
  }
  __device__ __forceinline__ void copy_step(int32_t step) {
    if (step < last_step_) {
      const int index = step % slot_count(kTile);
      copy_rows<kTile.size, kKeyPitch>(arguments_.key.data, key_offsets(index), arguments_.size, stage(step));
      copy_rows<kTile.value_size, kValuePitch>(arguments_.value.data, value_offsets(index), arguments_.value_size,
                                               stage(step) + kTeamKeys * kKeyPitch);
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void walk() {
    for (int i = 0; i < kStages; ++i) {
      if (first_step_ + i < last_step_) keep_offset(first_step_ + i, load_page(first_step_ + i));
    }
    int32_t page = load_page(first_step_ + kStages);
    meet_team();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy_step(first_step_ + i);
    for (int32_t step = first_step_; step < last_step_; ++step) {
      ptx::cp_async_wait_group<kStages - 2>();
      meet_team();  // this step has come, all are done with the one before it, offsets of later ones are there
      copy_step(step + kStages - 1);
      if (step + kStages < last_step_) keep_offset(step + kStages, page);
      page = load_page(step + kStages + 1);
      take(step);
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void take(int32_t step) {
    const int index = step % slot_count(kTile);
    float scores[kScores];
#pragma unroll
    for (float& score : scores) score = 0.0f;
    multiply_keys<Element, Cache, kTeamKeys, kTile.size, kKeyPitch>(scores, stage(step),
                                                                    [&](uint32_t(&fragment)[4], int depth) {
                                                                      if constexpr (kKeepsQueries) {
#pragma unroll
                                                                        for (int i = 0; i < 4; ++i)
                                                                          fragment[i] = fragment_[depth][i];
                                                                      } else {
                                                                        load_fragment(fragment, depth);
                                                                      }
                                                                    });
    const int32_t first_key = step * kTile.keys + team() * kTeamKeys;
    change(scores, index, first_key);
    bool is_edge = arguments_.mask != nullptr || first_key < all_first_ || first_key + kTeamKeys > all_last_;
#pragma unroll
    for (int i = 0; i < kWords; ++i) is_edge = is_edge || presence(index)[i] != kAllThere;
    if (is_edge) hide(scores, index, first_key);
    soften(scores);
    if constexpr (kIsCode<Cache>) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] *= value_scales(index)[tile::fragment_column(lane(), i)] * Power::kWeight;
      }
    }
    multiply_values<Element, Cache, kTeamKeys, kTile.value_size, kValuePitch>(output_, scores,
                                                                              stage(step) + kTeamKeys * kKeyPitch);
  }

  // Scores to base 2.
  __device__ __forceinline__ void change(float (&scores)[kScores], int index, int32_t first_key) {
    const float scale = arguments_.scale * Power::kScore;
    const bool is_plain = arguments_.softcap <= 0.0f && arguments_.alibi_slopes == nullptr;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = tile::fragment_column(lane(), i);
      float score = scores[i];
      if constexpr (kIsCode<Cache>) score *= key_scales(index)[column];
      if (is_plain) {
        scores[i] = score * (scale * tile::kLog2E);
        continue;
      }
      score *= scale;
      if (arguments_.softcap > 0.0f) score = arguments_.softcap * tanhf(score / arguments_.softcap);
      score -= slope_[i / 2 % 2] * fabsf(static_cast<float>(first_key + column - position_[i / 2 % 2]));
      scores[i] = score * tile::kLog2E;
    }
  }

  __device__ __forceinline__ void hide(float (&scores)[kScores], int index, int32_t first_key) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2, place = tile::fragment_column(lane(), i);
      const int32_t key = first_key + place;
      bool is_kept =
          (presence(index)[place / 32] >> place % 32 & 1) != 0 && key >= range_[half].first && key < range_[half].last;
      if (is_kept) is_kept = !is_masked(arguments_, segment_.request, query_[half], key);
      if (!is_kept) scores[i] = tile::minus_infinity();
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

  __device__ __forceinline__ float* result_of(int warp) const {
    return reinterpret_cast<float*>(stages()) + warp * 16 * (kTile.value_size + 4 + 2);
  }

  // Every warp leaves its rows where all can read them.
  __device__ __forceinline__ void meet() {
    float* own = result_of(static_cast<int>(threadIdx.x) / 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half] + __shfl_xor_sync(0xffffffffu, sum_[half], 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = lane() / 4 + 8 * half;
      if (lane() % 4 == 0) {
        own[16 * (kTile.value_size + 4) + row] = largest_[half];
        own[16 * (kTile.value_size + 5) + row] = sum;
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      own[tile::fragment_row(lane(), i) * (kTile.value_size + 4) + value_column<Cache>(lane(), i)] = output_[i];
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store(float* piece) {
    constexpr int kRowThreads = kThreads / kRows;
    const int32_t row = static_cast<int32_t>(threadIdx.x) / kRowThreads,
                  thread = static_cast<int32_t>(threadIdx.x) % kRowThreads;
    if (first_row_ + row >= row_count()) return;
    float weights[kTeams], largest = tile::minus_infinity(), sum = 0.0f;
    const int first_warp = row / 16 * kTeams, place = row % 16;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) {
      weights[i] = result_of(first_warp + i)[16 * (kTile.value_size + 4) + place];
      largest = fmaxf(largest, weights[i]);
    }
    const float base = largest == tile::minus_infinity() ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) {
      weights[i] = ptx::ex2_approx_ftz_f32(weights[i] - base);
      sum += weights[i] * result_of(first_warp + i)[16 * (kTile.value_size + 5) + place];
    }
    const Row at = row_at(first_row_ + row);
    const int32_t token = segment_.request.first_query + at.query;
    float factor = 1.0f;
    if (piece == nullptr) {
      const float lse = finish_row(arguments_, at.head, largest, sum, factor);
      if (thread == 0 && arguments_.lse != nullptr) arguments_.lse[at.head * arguments_.tokens + token] = lse;
    } else if (thread == 0) {
      piece[kRows * kTile.value_size + row] = largest;
      piece[kRows * (kTile.value_size + 1) + row] = sum;
    }
    factor *= Power::kOutput;
    Element* output = static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                      at.head * arguments_.output_head_stride;
    for (int32_t column = thread; column < arguments_.value_size; column += kRowThreads) {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kTeams; ++i) {
        value += weights[i] * result_of(first_warp + i)[place * (kTile.value_size + 4) + column];
      }
      if (piece == nullptr) {
        output[column] = tile::from_float<Element>(value * factor);
      } else {
        piece[row * kTile.value_size + column] = value * factor;
      }
    }
  }

  const WorkArguments& work_;
  const AttendArguments& arguments_;
  char* shared_;
  Segment segment_;
  int32_t first_row_, first_step_, last_step_, all_first_, all_last_;
  int32_t query_[2], position_[2];
  KeyRange range_[2];
  float slope_[2], largest_[2], sum_[2];
  uint32_t fragment_[kKeepsQueries ? kDepths : 1][4];
  float output_[kOutputs];
};

template <class Element, class Cache, Tile kTile>
__global__ void __launch_bounds__(kThreads) attend(const __grid_constant__ WorkArguments work) {
  extern __shared__ __align__(16) char shared[];
  Attention<Element, Cache, kTile>(work, shared).run();
}

}  // namespace kernel_pytorch::paged_attention
