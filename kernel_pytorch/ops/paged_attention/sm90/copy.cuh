// The warps that copy: rows of keys and values of all heads of the block, step by step, into a ring of stages. Each
// has a quarter of the keys. Where a key's rows of all these heads are one run of bytes, the copy engine moves it.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/ops/paged_attention/sm90/piece.cuh"

namespace kernel_pytorch::paged_attention {

template <class Cache, Tile kTile>
class Copier {
  static constexpr int kKeys = kTile.keys / kCopyWarps;  // of a warp
  static constexpr int kPerLane = (kKeys + 31) / 32;     // keys whose pages a lane reads
  static constexpr int kAhead = 8;                       // steps whose pages are asked for
  static_assert(kTile.keys % kCopyWarps == 0);

 public:
  __device__ __forceinline__ Copier(const WorkArguments& work, const Memory<kTile>& memory)
      : arguments_(work.attend), memory_(memory), has_runs_(work.has_runs) {}

  // A step behind the other; the pages of the next one are read while this one is copied.
  __device__ __forceinline__ void copy(const Segment& segment, const Steps& steps, tile::PipelineState& state) {
    int32_t pages[kPerLane];
    load_pages(segment, steps, steps.first, pages);
    for (int32_t step = steps.first; step < steps.last; ++step) {
      int32_t next[kPerLane];
      load_pages(segment, steps, step + 1, next);
      prefetch_pages(segment, steps, step + kAhead);
      memory_.empty(state.stage).wait(state.parity ^ 1);
      if (has_runs_) {
        copy_runs(segment, step, pages, state.stage);
      } else {
        copy_step(segment, step, pages, state.stage);
      }
      state.advance(kTile.stages);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) pages[i] = next[i];
    }
  }

  // A stage without rows, which the multiplying warps use for their results.
  __device__ __forceinline__ void lend(tile::PipelineState& state) {
    memory_.empty(state.stage).wait(state.parity ^ 1);
    if (!has_runs_) memory_.full(state.stage).arrive();
    if (lane() == 0) memory_.full(state.stage).arrive();
    state.advance(kTile.stages);
  }

 private:
  __device__ __forceinline__ int32_t lane() const {
    return static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ int32_t first() const {
    return static_cast<int32_t>(threadIdx.x / 32) % kCopyWarps * kKeys;
  }

  __device__ __forceinline__ void load_pages(const Segment& segment, const Steps& steps, int32_t step,
                                             int32_t (&pages)[kPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t key = step * kTile.keys + first() + lane() + 32 * i;
      const bool is_there = lane() + 32 * i < kKeys && step < steps.last && key < segment.request.keys;
      pages[i] = is_there ? page_of(arguments_, segment.request, key) : -1;
    }
  }

  // Pages of small size make a table that caches do not hold: its entries are asked for long before they are read.
  __device__ __forceinline__ void prefetch_pages(const Segment& segment, const Steps& steps, int32_t step) const {
    const int32_t key = step * kTile.keys + first() + lane();
    if (lane() % 8 != 0 || lane() >= kKeys || step >= steps.last || key >= segment.request.keys) return;
    ptx::prefetch_global_l2(arguments_.block_tables + static_cast<int64_t>(segment.request.index) * arguments_.table +
                            divide(static_cast<uint32_t>(key), arguments_.page_divider));
  }

  __device__ __forceinline__ void copy_step(const Segment& segment, int32_t step, const int32_t (&pages)[kPerLane],
                                            int stage) {
    const int32_t head = segment.head_group * kTile.heads;
    __syncwarp();  // all have read the offsets of the step before
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane() + 32 * i >= kKeys) continue;
      const int32_t place = first() + lane() + 32 * i, row = row_in_page(arguments_, step * kTile.keys + place);
      memory_.presence(stage)[place] = pages[i] >= 0;
      memory_.offsets(0)[place] = pages[i] < 0 ? -1 : offset_in(arguments_.key, pages[i], row, head);
      memory_.offsets(1)[place] = pages[i] < 0 ? -1 : offset_in(arguments_.value, pages[i], row, head);
      if constexpr (sizeof(Cache) == 1) {
        copy_scales(arguments_.key, pages[i], row, head, memory_.scales(stage, 0) + place * kTile.heads);
        copy_scales(arguments_.value, pages[i], row, head, memory_.scales(stage, 1) + place * kTile.heads);
      }
    }
    __syncwarp();
    if (lane() == 0) memory_.full(stage).arrive();  // releases what it wrote of presence
    copy_rows<kTile.size, heads_key_pitch(kTile)>(arguments_.key, memory_.offsets(0), arguments_.size,
                                                  memory_.rows(stage));
    copy_rows<kTile.value_size, heads_value_pitch(kTile)>(arguments_.value, memory_.offsets(1), arguments_.value_size,
                                                          memory_.rows(stage) + kTile.keys * heads_key_pitch(kTile));
    ptx::cp_async_mbarrier_arrive_noinc(memory_.full(stage).address());
  }

  // Keys that are not there become zeros: what lay there before could be anything.
  __device__ __forceinline__ void copy_runs(const Segment& segment, int32_t step, const int32_t (&pages)[kPerLane],
                                            int stage) const {
    constexpr uint32_t kKeyBytes = heads_key_pitch(kTile) - 16, kValueBytes = heads_value_pitch(kTile) - 16;
    const int32_t head = segment.head_group * kTile.heads;
    const uint32_t keys = memory_.rows(stage), values = keys + kTile.keys * heads_key_pitch(kTile);
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool is_own = lane() + 32 * i < kKeys;
      count += __popc(__ballot_sync(0xffffffffu, is_own && pages[i] >= 0));
      if (is_own) memory_.presence(stage)[first() + lane() + 32 * i] = pages[i] >= 0;
    }
    __syncwarp();
    if (count < kKeys) clear_missing(pages, keys, values);
    if (lane() == 0) memory_.full(stage).arrive_expect_bytes(count * (kKeyBytes + kValueBytes));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane() + 32 * i >= kKeys || pages[i] < 0) continue;
      const int32_t place = first() + lane() + 32 * i, row = row_in_page(arguments_, step * kTile.keys + place);
      const auto at = [&](const CacheArguments& cache) {
        return static_cast<const Cache*>(cache.data) + offset_in(cache, pages[i], row, head);
      };
      tile::copy_to_shared(keys + place * heads_key_pitch(kTile), at(arguments_.key), kKeyBytes, memory_.full(stage));
      tile::copy_to_shared(values + place * heads_value_pitch(kTile), at(arguments_.value), kValueBytes,
                           memory_.full(stage));
    }
  }
  __device__ __forceinline__ void clear_missing(const int32_t (&pages)[kPerLane], uint32_t keys,
                                                uint32_t values) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      for (int other = 0; other < 32 && other + 32 * i < kKeys; ++other) {
        if (__shfl_sync(0xffffffffu, pages[i], other) >= 0) continue;
        const int32_t place = first() + other + 32 * i;
        for (int at = lane() * 16; at < heads_key_pitch(kTile) - 16; at += 512) {
          ptx::st_shared_v4(keys + place * heads_key_pitch(kTile) + at, {});
        }
        for (int at = lane() * 16; at < heads_value_pitch(kTile) - 16; at += 512) {
          ptx::st_shared_v4(values + place * heads_value_pitch(kTile) + at, {});
        }
      }
    }
    ptx::fence_proxy_async_shared_cta();  // before the copy engine writes here again
    __syncwarp();
  }

  // Scales of tokens; one for all or one for each head the multiplying warps read by themselves.
  __device__ __forceinline__ void copy_scales(const CacheArguments& cache, int32_t page, int32_t row, int32_t head,
                                              float* to) const {
    if (!has_token_scales(cache)) return;
#pragma unroll
    for (int i = 0; i < kTile.heads; ++i) {
      const float* from = cache.scales + max(page, 0) * cache.scale_page_stride + row * cache.scale_row_stride +
                          (head + i) * cache.scale_head_stride;
      ptx::cp_async_ca_shared_global_4_fill(ptx::shared_address(to + i), from, page < 0 ? 0 : 4);
    }
  }

  template <int kColumns, int kPitch>
  __device__ __forceinline__ void copy_rows(const CacheArguments& cache, const int64_t* offsets, int32_t columns,
                                            uint32_t to) {
    constexpr int kHeadUnits = kColumns * sizeof(Cache) / 16, kUnits = kTile.heads * kHeadUnits;
    const char* data = static_cast<const char*>(cache.data);
#pragma unroll 8
    for (int i = lane(); i < kKeys * kUnits; i += 32) {
      const int row = first() + i / kUnits, unit = i % kUnits, head = unit / kHeadUnits,
                inside = unit % kHeadUnits * 16;
      const int64_t offset = offsets[row];
      const char* from = data + (offset + head * cache.head_stride) * static_cast<int64_t>(sizeof(Cache)) + inside;
      const int32_t bytes = columns * static_cast<int32_t>(sizeof(Cache)) - inside;
      ptx::cp_async_cg_shared_global_16_fill(to + row * kPitch + unit * 16, offset < 0 ? data : from,
                                             offset < 0 ? 0 : max(0, min(16, bytes)));
    }
  }

  const AttendArguments& arguments_;
  const Memory<kTile>& memory_;
  bool has_runs_;
};

}  // namespace kernel_pytorch::paged_attention
