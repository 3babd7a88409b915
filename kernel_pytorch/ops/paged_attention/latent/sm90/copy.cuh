// The warps that copy latent rows and rope rows into swizzled chunks. By the page table, 16 bytes a thread: pages of
// any size, and keys that are not there become zeros; each warp has a quarter of the keys of both blocks of a step. In
// boxes, by the copy engine: pages of a multiple of 64 keys, where a step ends before the request does; the rest of a
// last page may be NaN, and goes the other way. Of a cluster each block reads half of the boxes, for both.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/memory.cuh"

namespace kernel_pytorch::paged_attention {

template <Tile kTile, bool kBoxes>
class LatentCopier {
  static constexpr int kKeys = kLatentKeys / kLatentCopyWarps;  // of a warp and block: 16
  static constexpr int kAhead = 4;                              // steps whose pages are asked for
  static constexpr uint32_t kAll = 0xffffffffu, kNone = 0xffffffffu;

 public:
  __device__ __forceinline__ LatentCopier(const LatentArguments& arguments, const LatentRoom& room)
      : maps_(arguments), arguments_(arguments.work.attend), room_(room), piece_(room.piece()) {}

  // The pages of a step are read while the one before it is copied.
  __device__ __forceinline__ void copy() {
    const int32_t last = piece_.steps.last;
    int32_t step = piece_.steps.first, page = load_page(step);
#pragma unroll 1
    for (; step < last; ++step) {
      const int32_t next = load_page(step + 1);
      prefetch_page(step + kAhead);
      copy_step(step, page);
      parity_ ^= 1;
      page = next;
    }
  }

 private:
  __device__ __forceinline__ int32_t lane() const {
    return static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ int32_t first_row() const {
    return static_cast<int32_t>(threadIdx.x / 32) % kLatentCopyWarps * kKeys;
  }
  // A lane looks after one key: the lower half of the warp of the first block, the upper one of the second.
  __device__ __forceinline__ int32_t key_of_lane(int32_t step) const {
    return (2 * step + lane() / kKeys) * kLatentKeys + first_row() + lane() % kKeys;
  }
  __device__ __forceinline__ int32_t load_page(int32_t step) const {
    const int32_t key = key_of_lane(step);
    return step < piece_.steps.last && key < piece_.request.keys ? page_of(arguments_, piece_.request, key) : -1;
  }
  // Pages of small size make a table that caches do not hold: its entries are asked for long before they are read.
  __device__ __forceinline__ void prefetch_page(int32_t step) const {
    const int32_t key = key_of_lane(step);
    if (lane() % 8 != 0 || step >= piece_.steps.last || key >= piece_.request.keys) return;
    ptx::prefetch_global_l2(arguments_.block_tables + static_cast<int64_t>(piece_.request.index) * arguments_.table +
                            divide(static_cast<uint32_t>(key), arguments_.page_divider));
  }

  __device__ __forceinline__ void copy_step(int32_t step, int32_t page) {
    const int32_t row = row_in_page(arguments_, key_of_lane(step));
    const uint32_t there = __ballot_sync(kAll, page >= 0);
    if constexpr (kBoxes) {
      if ((step + 1) * kTile.keys <= piece_.request.keys) {
        page = page < 0 ? arguments_.pages : page;  // outside of the caches: zeros
        const int32_t pages[2] = {__shfl_sync(kAll, page, 0), __shfl_sync(kAll, page, kKeys)};
        const int32_t rows[2] = {__shfl_sync(kAll, row, 0), __shfl_sync(kAll, row, kKeys)};
        ask<kFirstLeft, 0, 0>(there, rows[0], pages[0]);
        ask<kSecondRight, 1, 1>(there, rows[1], pages[1]);
        ask<kFirstRight, 0, 1>(there, rows[0], pages[0]);
        ask<kSecondLeft, 1, 0>(there, rows[1], pages[1]);
        return;
      }
    }
    latent_ = page < 0 ? kNone : static_cast<uint32_t>(offset_in(arguments_.key, page, row, 0) / 8);
    rope_ = page < 0 ? kNone : static_cast<uint32_t>(offset_in(arguments_.value, page, row, 0) / 8);
    copy_part<kFirstLeft, 0, 0>(there);
    copy_part<kSecondRight, 1, 1>(there);
    copy_part<kFirstRight, 0, 1>(there);
    copy_part<kSecondLeft, 1, 0>(there);
  }

  // The second part of a block that comes has its rope columns.
  static constexpr bool has_rope(LatentPart part) {
    return part == kFirstRight || part == kSecondLeft;
  }
  // With the part that comes first: whoever reads it has given that part back.
  template <LatentPart kPart, int kBlock>
  __device__ __forceinline__ void note_presence(uint32_t there) const {
    if constexpr (!has_rope(kPart)) {
      room_.shared().presence[kBlock][first_row() / kKeys] = static_cast<uint16_t>(there >> kBlock * kKeys);
    }
  }

  // A part as boxes of 64 rows and columns.
  template <LatentPart kPart, int kBlock, int kHalf>
  __device__ __forceinline__ void ask(uint32_t there, int32_t row, int32_t page) {
    constexpr int kShare = latent_share(kTile), kChunks = kLatentValueChunks / 2;
    LatentShared& shared = room_.shared();
    tile::Barrier& full = shared.full[kPart];
    shared.empty[kPart].wait(parity_ ^ 1);
    if (lane() != 0) return;
    note_presence<kPart, kBlock>(there);
    if (first_row() != 0) {
      full.arrive();
      return;
    }
    full.arrive_expect_bytes((kChunks + has_rope(kPart)) * kLatentChunkBytes);
    const int32_t rank = static_cast<int32_t>(blockIdx.x) % kShare;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = kChunks * kHalf + i;
      if (rank == i % kShare) ask_box(maps_.latent, room_.chunk(kBlock, chunk), chunk * 64, row, page, full);
    }
    if (has_rope(kPart) && rank == kBlock % kShare) ask_box(maps_.rope, room_.rope(kBlock), 0, row, page, full);
  }
  static __device__ __forceinline__ void ask_box(const tile::TensorMap& map, uint32_t to, int32_t column, int32_t row,
                                                 int32_t page, const tile::Barrier& full) {
    if constexpr (latent_share(kTile) > 1) {
      ptx::cp_async_bulk_tensor_3d_shared_global_multicast(to, &map, column, row, page, full.address(), 3);
    } else {
      ptx::cp_async_bulk_tensor_3d_shared_global(to, &map, column, row, page, full.address());
    }
  }

  template <LatentPart kPart, int kBlock, int kHalf>
  __device__ __forceinline__ void copy_part(uint32_t there) {
    LatentShared& shared = room_.shared();
    shared.empty[kPart].wait(parity_ ^ 1);
    if (lane() == 0) {
      note_presence<kPart, kBlock>(there);
      if constexpr (!kBoxes) shared.full[kPart].arrive();
    }
    const char* latent = static_cast<const char*>(arguments_.key.data) + kHalf * 512 + lane() * 16;
    const uint32_t to = room_.chunk(kBlock, 4 * kHalf + lane() / 8) + first_row() * 128;
#pragma unroll 8
    for (int i = 0; i < kKeys; ++i) {
      const uint32_t offset = __shfl_sync(kAll, latent_, kBlock * kKeys + i);
      ptx::cp_async_cg_shared_global_16_fill(to + tile::swizzled_offset(i, lane() % 8), at(latent, offset),
                                             offset == kNone ? 0 : 16);
    }
    if constexpr (has_rope(kPart)) {
      const char* rope = static_cast<const char*>(arguments_.value.data) + lane() % 8 * 16;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int row = 4 * i + lane() / 8;
        const uint32_t offset = __shfl_sync(kAll, rope_, kBlock * kKeys + row);
        ptx::cp_async_cg_shared_global_16_fill(
            room_.rope(kBlock) + tile::swizzled_offset(first_row() + row, lane() % 8), at(rope, offset),
            offset == kNone ? 0 : 16);
      }
    }
    if constexpr (kBoxes) {  // a barrier that expects one arrival of a warp
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      ptx::fence_proxy_async_shared_cta();
      __syncwarp();
      if (lane() == 0) shared.full[kPart].arrive();
    } else {
      ptx::cp_async_mbarrier_arrive_noinc(shared.full[kPart].address());
    }
  }

  static __device__ __forceinline__ const char* at(const char* data, uint32_t offset) {
    return data + (offset == kNone ? 0 : static_cast<uint64_t>(offset) * 16);
  }

  const LatentArguments& maps_;
  const AttendArguments& arguments_;
  const LatentRoom room_;
  const LatentPiece& piece_;
  uint32_t parity_ = 0;
  uint32_t latent_ = kNone, rope_ = kNone;  // where the lane's rows begin, in units of 16 bytes
};

}  // namespace kernel_pytorch::paged_attention
