// The sums of a tile whose k is divided among the blocks of a cluster. Each block finishes the rows of some warps: the
// same warp of every other block sends what it has of them, 16 bytes a lane, into memory of the finishing block, which
// adds the parts in the order of the blocks, so that the result is the same bits on every run. A block has one tile, so
// nothing is ever sent twice. sm_90.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"

namespace kernel_pytorch::product {

template <Sm90Config kConfig>
class Sm90Exchange {
  static constexpr int kParts = sm90_parts(kConfig), kPartBytes = sm90_part_bytes(kConfig);

 public:
  // By one thread, before the cluster synchronises.
  static __device__ __forceinline__ void init(Sm90Shared& shared) {
    for (int i = 0; i < sm90_finished_warps(kConfig); ++i) {
      shared.parts[i].init(1);
      shared.parts[i].arrive_expect_bytes((kParts - 1) * kPartBytes);
    }
  }

  // `warp`: of the eight that multiply.
  __device__ __forceinline__ Sm90Exchange(Sm90Shared& shared, uint32_t tiles, int32_t warp)
      : shared_(shared),
        owner_(warp % kParts),
        of_owner_(warp / kParts),
        rank_(block_rank<kConfig>()),
        parts_(tiles + sm90_exchange_at(kConfig) + warp / kParts * (kParts - 1) * kPartBytes +
               static_cast<int32_t>(threadIdx.x % 32) * 16) {}

  __device__ __forceinline__ bool finishes() const { return rank_ == owner_; }

  // True where the sums are whole now and this warp finishes them.
  template <int kCount>
  __device__ __forceinline__ bool meet(float (&sums)[kCount]) const {
    static_assert(kCount * 128 == kPartBytes);
    if (!finishes()) {
      const uint32_t barrier = ptx::mapa_shared_cluster(shared_.parts[of_owner_].address(), owner_);
      const uint32_t target =
          ptx::mapa_shared_cluster(parts_ + (rank_ < owner_ ? rank_ : rank_ - 1) * kPartBytes, owner_);
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        ptx::st_async_shared_cluster_v4_f32(target + i * 128, sums[i], sums[i + 1], sums[i + 2], sums[i + 3], barrier);
      }
      return false;
    }
    shared_.parts[of_owner_].wait_cluster(0);
#pragma unroll 1
    for (int part = 0; part < kParts - 1; ++part) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const ptx::Word4 words = ptx::ld_shared_v4(parts_ + part * kPartBytes + i * 128);
        sums[i] += __uint_as_float(words.x);
        sums[i + 1] += __uint_as_float(words.y);
        sums[i + 2] += __uint_as_float(words.z);
        sums[i + 3] += __uint_as_float(words.w);
      }
    }
    return true;
  }

 private:
  Sm90Shared& shared_;
  int32_t owner_, of_owner_, rank_;
  uint32_t parts_;  // shared memory, this lane's place in the first part
};

}  // namespace kernel_pytorch::product
