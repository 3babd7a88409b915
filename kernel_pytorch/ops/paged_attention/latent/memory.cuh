// Shared memory of a block of attention over latent rows.
#pragma once

#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::paged_attention {

template <Tile kTile>
class LatentMemory {
  static constexpr int kRows = tile_rows(kTile), kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr int kSplits = kTile.warps * 8 / kKeys, kCopies = latent_copies(kTile);

 protected:
  static constexpr int kLatentPitch = latent_pitch(kTile), kRopePitch = rope_pitch(kTile);
  static constexpr int kQueryPitch = query_pitch(kTile), kWeightPitch = kKeys * 2 + 16, kScorePitch = kKeys + 8;

  __device__ __forceinline__ explicit LatentMemory(char* shared) : shared_(shared) {}

  // Shared memory, in this order; latent_shared_bytes adds it up.
  __device__ __forceinline__ char* stage(int32_t step) const {
    return shared_ + step % kStages * latent_stage_bytes(kTile);
  }
  __device__ __forceinline__ char* rope(int32_t step) const { return stage(step) + kKeys * kLatentPitch; }
  __device__ __forceinline__ float* scales(int32_t step) const {  // [keys][128 columns]
    return reinterpret_cast<float*>(rope(step) + kKeys * kRopePitch);
  }
  __device__ __forceinline__ char* queries() const { return shared_ + kStages * latent_stage_bytes(kTile); }
  __device__ __forceinline__ float* scores() const { return reinterpret_cast<float*>(queries() + kRows * kQueryPitch); }
  __device__ __forceinline__ char* weights() const {
    return reinterpret_cast<char*>(scores() + kSplits * kRows * kScorePitch);
  }
  __device__ __forceinline__ float* rescale() const {
    return reinterpret_cast<float*>(weights() + kCopies * kRows * kWeightPitch);
  }
  __device__ __forceinline__ float* largests() const { return rescale() + kRows; }
  __device__ __forceinline__ float* sums() const { return largests() + kRows; }
  // Where a key's latent (0) and rope (1) rows begin, in bytes, and its page, -1 for none: of the steps under way and
  // the next.
  __device__ __forceinline__ int64_t* offsets(int32_t step, int which) const {
    return reinterpret_cast<int64_t*>(sums() + kRows) + (step % (kStages + 1) * 2 + which) * kKeys;
  }
  __device__ __forceinline__ int32_t* pages(int32_t step) const {
    return reinterpret_cast<int32_t*>(offsets(0, 0) + (kStages + 1) * 2 * kKeys) + step % (kStages + 1) * kKeys;
  }

 private:
  char* shared_;
};

}  // namespace kernel_pytorch::paged_attention
