// The warpgroup that makes chunks ready for the state (split.cuh): it sums gates, scales queries and keys (or values)
// where they lie in shared memory, and multiplies and masks scores. sm_90a.
//
// With G the sum of gates up to a token of a window, from its first token on, and M half of the whole sum:
//   forwards   queries e^(G - M), keys or values e^(M - G), backwards the other way round.
// Of the products of two tokens those are kept whose factors make e^(G_t - G_s) <= 1. The state is multiplied by e^M in
// front of the window and by e^(G_last - M) behind it (backwards: the other way round). Where G leaves +-kMostReach the
// chunk is cut: strong gates make shorter windows, down to one token, instead of wrong ones.
#pragma once

#include "kernel_pytorch/ops/linear_attention/sm90/gate_sums.cuh"

namespace kernel_pytorch::linear_attention {

template <class T, SplitConfig kConfig>
class Scaler : private GateSums<T, kConfig> {
  using Base = GateSums<T, kConfig>;
  using Base::arguments_;
  using Base::cut;
  using Base::first_;
  using Base::first_of;
  using Base::first_token_;
  using Base::first_value_;
  using Base::gated_first;
  using Base::gated_size;
  using Base::head_;
  using Base::kGated;
  using Base::kGatesValues;
  using Base::kLanes;
  using Base::kPairs;
  using Base::kParts;
  using Base::kTileBytes;
  using Base::kTokens;
  using Base::meet;
  using Base::pair_;
  using Base::prefetch_gates;
  using Base::read_sums;
  using Base::shared_;
  using Base::stretch_;
  using Base::sum_gates;
  using Base::sums_;
  using Base::thread_;
  using Base::warp_;
  using Base::write_totals;
  using Mma = ptx::Wgmma<64, kSplitWgmmaType<T>>;
  using RowTile = tile::AlongColumns<kSm90Chunk>;
  struct Window {
    int begin, end;
    bool is_whole, is_last;
  };

 public:
  __device__ __forceinline__ Scaler(const ChunkArguments& arguments, SplitShared& shared, uint32_t tiles)
      : Base(arguments, shared), tiles_(tiles) {}

  __device__ __forceinline__ void run() {
    float all[kLanes] = {};
    tile::PipelineState place;
    prefetch_gates(0);
#pragma unroll 1
    for (int32_t i = 0; i < stretch_.chunks; ++i) {
      int count;
      first_ = first_of(i, count);
      float total[kLanes];
      const int windows = sum_gates(count, total) <= kMostReach<T> ? 1 : cut(count);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) all[lane] += total[lane];
      shared_.full[place.stage].wait(place.parity);
      stage_ = tiles_ + place.stage * split_stage_bytes(kConfig);
      if (count < kSm90Chunk) clear_rows(count);
#pragma unroll 1
      for (int k = 0; k < windows; ++k) {
        Window window{0, count, windows == 1, k + 1 == windows};
        float base[kLanes] = {}, last[kLanes];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) last[lane] = total[lane];
        if (!window.is_whole) {
          const int at = arguments_.scan.backwards ? windows - 1 - k : k;
          window.begin = shared_.bounds[at];
          window.end = shared_.bounds[at + 1];
          read_sums(window.begin - 1, 0, base);
          read_sums(window.end - 1, kParts / 2 * kGated, last);
          // What the window before left in the stage is in use until it is taken.
          if (k > 0) {
            wait_for_window(window_ - 1);
            restore_rows(window);
          }
        }
        take(window, i, base, last);
      }
      place.advance(split_stages(kConfig));
    }
    if (kConfig.only_states && arguments_.totals != nullptr) write_totals(all);
  }

 private:
  __device__ __forceinline__ void wait_for_window(int32_t window) {
    shared_.taken[window % kSplitSlots].wait(window / kSplitSlots & 1);
  }

  __device__ __forceinline__ void take(const Window& window, int32_t number, const float (&base)[kLanes],
                                       const float (&last)[kLanes]) {
    const bool backwards = arguments_.scan.backwards;
    const int place = window_ % kSplitSlots;
    SplitSlot& slot = shared_.slots[place];
    if (window_ >= kSplitSlots) wait_for_window(window_ - kSplitSlots);
    float middle[kLanes];  // M + base
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float sum = last[lane] - base[lane];
      const float half = window.end - window.begin == 1 ? sum : 0.5f * sum;
      middle[lane] = base[lane] + half;
      const float head = ptx::ex2_approx_ftz_f32(half), tail = ptx::ex2_approx_ftz_f32(sum - half);
      factor_[lane] = after_[lane] * (backwards ? tail : head);
      after_[lane] = backwards ? head : tail;
    }
    if (first_token_ == 0) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        slot.factors[2 * pair_ + k] = factor_[k % kLanes];
        if (window.is_last && number + 1 == stretch_.chunks) shared_.after[2 * pair_ + k] = after_[k % kLanes];
      }
    }
    if (thread_ == 0) {
      slot.begin = window.begin;
      slot.end = window.end;
      slot.is_last = window.is_last;
    }
    scale_rows(window, middle);
    if (window.is_last) prefetch_gates(number + 1);
    if constexpr (!kConfig.only_states) {
      ptx::fence_proxy_async_shared_cta();
      meet();
      multiply_scores(window, place);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (thread_ % 32 == 0) shared_.ready[place].arrive();
    ++window_;
  }

  // Rows of the window by their factors, other keys (or values) zero.
  __device__ __forceinline__ void scale_rows(const Window& window, const float (&middle)[kLanes]) {
    const ScanArguments& scan = arguments_.scan;
    constexpr bool kScalesQueries = !kConfig.only_states && !kGatesValues;
    const uint32_t gated =
        gated_tiles() + pair_ / 32 * kTileBytes + pair_ % 4 * 4 + first_token_ * tile::kChunkRowBytes;
    const uint32_t factors =
        tiles_ + split_outputs_at(kConfig) + pair_ / 32 * split_output_bytes(kConfig) + first_token_ * 256;
    const uint32_t queries = gated + split_rows_bytes(kConfig) + kConfig.warpgroups * values_bytes();
    const int unit = pair_ % 32 / 4;
    const float sign = scan.backwards ? -1.0f : 1.0f;
    if (kGatesValues && !kConfig.only_states && window_ > 0) wait_for_window(window_ - 1);  // factors of outputs
    // Bit t: token t of the thread's.
    const uint32_t inside = bits_below(window.end - first_token_) & ~bits_below(window.begin - first_token_);
    constexpr int kGroup = 8;  // tokens whose loads are under way together
#pragma unroll
    for (int group = 0; group < kTokens; group += kGroup) {
      uint32_t words[kGroup], query_words[kGroup];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const uint32_t offset = tile::swizzled_offset(group + k, unit);
        words[k] = ptx::ld_shared_b32(gated + offset);
        if constexpr (kScalesQueries) query_words[k] = ptx::ld_shared_b32(queries + offset);
      }
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const int t = group + k;
        const bool is_inside = inside >> t & 1;
        const uint32_t offset = tile::swizzled_offset(t, unit);
        float of_query[2], of_key[2];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float distance = sign * sums_[t][lane] - sign * middle[lane];
          of_query[lane] = ptx::ex2_approx_ftz_f32(distance);
          of_key[lane] = ptx::ex2_approx_ftz_f32(-distance) * scan.key_scale;
        }
        ptx::st_shared_f32(gated + offset, __uint_as_float(is_inside ? scaled(words[k], of_key) : 0));
        if constexpr (kScalesQueries) {
          if (is_inside) ptx::st_shared_f32(queries + offset, __uint_as_float(scaled(query_words[k], of_query)));
        } else if constexpr (!kConfig.only_states) {
          ptx::st_shared_v2_f32(factors + output_factor_offset(t, 2 * (pair_ % 32)), of_query[0], of_query[1]);
        }
      }
    }
  }
  static __device__ __forceinline__ uint32_t bits_below(int count) {
    return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1;
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t word, const float (&factors)[2]) {
    float values[2];
    tile::Word<T>::unpack(word, values);
    values[0] *= factors[0];
    values[1] *= factors[kLanes - 1];
    return tile::Word<T>::pack(values);
  }
  // Keys, or values where gates are of those.
  __device__ __forceinline__ uint32_t gated_tiles() const {
    return kGatesValues ? stage_ + split_rows_bytes(kConfig) : stage_;
  }

  // Keys (or values) of a window that is not its chunk's first: the windows before have written zeros over them.
  __device__ __forceinline__ void restore_rows(const Window& window) {
    const ScanArguments& scan = arguments_.scan;
    const ScanTensor& tensor = kGatesValues ? scan.value : scan.key;
    constexpr int kUnits = kGated / 8;  // of 16 bytes, of a row
#pragma unroll 1
    for (int i = thread_; i < (window.end - window.begin) * kUnits; i += 128) {
      const int token = window.begin + i / kUnits, unit = i % kUnits;
      ptx::Word4 words{0, 0, 0, 0};
      if (gated_first() + unit * 8 < gated_size()) {
        words = *reinterpret_cast<const ptx::Word4*>(row_of<T>(tensor, stretch_.batch, first_ + token, head_) +
                                                     gated_first() + unit * 8);
      }
      *reinterpret_cast<ptx::Word4*>(
          memory_at(gated_tiles() + unit / 8 * kTileBytes + tile::swizzled_offset(token, unit % 8))) = words;
    }
    meet();
  }

  // What lies behind the end of a sequence may be no number: the rows that nothing else sets to zero.
  __device__ __forceinline__ void clear_rows(int count) {
    const uint32_t first = kGatesValues ? stage_ : stage_ + split_rows_bytes(kConfig);
    constexpr int kTiles = kGatesValues ? kConfig.columns / 64 : kConfig.warpgroups;
    for (int i = thread_; i < (kSm90Chunk - count) * 8 * kTiles; i += 128) {
      const int row = count + i / 8 % (kSm90Chunk - count), tile = i / 8 / (kSm90Chunk - count);
      *reinterpret_cast<ptx::Word4*>(memory_at(first + tile * kTileBytes + row * tile::kChunkRowBytes) + i % 8 * 16) = {
          0, 0, 0, 0};
    }
  }
  static __device__ __forceinline__ unsigned char* memory_at(uint32_t address) {
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }

  __device__ __forceinline__ void multiply_scores(const Window& window, int place) {
    const int lane = thread_ % 32;
    const uint32_t queries = stage_ + split_rows_bytes(kConfig) + kConfig.warpgroups * values_bytes();
    float scores[Mma::kCount];
    ptx::wgmma_fence();
    tile::multiply<Mma, RowTile, RowTile, kConfig.columns / tile::kProductDepth>(scores, RowTile::base(queries),
                                                                                 RowTile::base(stage_), false);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(scores);
    const int row = 16 * warp_ + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) {
      const int t = row + i % 4 / 2 * 8, s = column + i / 4 * 8 + i % 2;
      const bool is_kept = (arguments_.scan.backwards ? s >= t : s <= t) && s >= window.begin && s < window.end;
      scores[i] = is_kept ? scores[i] : 0.0f;
    }
    uint32_t weights[Mma::kCount / 2];
    tile::pack_fragment<T>(weights, scores);
    const uint32_t to = tiles_ + split_scores_at(kConfig) + place * kScoreBytes;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const uint32_t words[4] = {weights[4 * group], weights[4 * group + 1], weights[4 * group + 2],
                                 weights[4 * group + 3]};
      ptx::stmatrix_x4(tile::fragment_address<kSm90Chunk>(to, 16 * warp_, group, lane), words);
    }
  }

  uint32_t tiles_, stage_ = 0;
  int32_t window_ = 0;  // windows so far
  float after_[2] = {1, 1}, factor_[2] = {1, 1};
};

}  // namespace kernel_pytorch::linear_attention
