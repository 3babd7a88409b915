// Sums over lanes, a block and a cluster. Every thread receives the total, in an order fixed by the shape alone, so
// that a result never depends on timing. A BlockSum or ClusterSum may be used again and again without a barrier in
// between: it alternates between two buffers.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/cluster.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"

namespace kernel_pytorch::tile {

inline constexpr int kWarpLanes = 32;
inline constexpr int kMaxClusterBlocks = 16;

// Over groups of kLanes neighbouring lanes. All lanes of the warp take part.
template <int kLanes, class Number>
__device__ __forceinline__ Number sum_lanes(Number value) {
  static_assert(kLanes >= 1 && kLanes <= kWarpLanes && (kLanes & (kLanes - 1)) == 0);
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// The threads that sum together: a block, or one of its groups of kWarps neighbouring warps.
template <int kWarps, int kGroups>
struct WarpGroup {
  static_assert(kGroups >= 1 && kGroups <= 15, "a block has fifteen barriers besides __syncthreads'");
  static __device__ __forceinline__ int index() { return kGroups == 1 ? 0 : threadIdx.x / (kWarps * kWarpLanes); }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpLanes % kWarps; }
  static __device__ __forceinline__ void synchronise() {
    if constexpr (kGroups == 1) {
      __syncthreads();
    } else {
      ptx::barrier_sync(index() + 1, kWarps * kWarpLanes);
    }
  }
};

template <int kWarps, int kValues, int kGroups = 1>
class BlockSum {
  using Group = WarpGroup<kWarps, kGroups>;

 public:
  struct Storage {
    alignas(16) float groups[kGroups][2][kValues][kWarps];
  };
  __device__ __forceinline__ explicit BlockSum(Storage& storage) : partials_(storage.groups[Group::index()]) {}

  // One barrier, after which every thread of the group has entered this call.
  __device__ __forceinline__ void sum(float (&values)[kValues]) {
    const int warp = Group::warp();
    const int lane = threadIdx.x % kWarpLanes;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = sum_lanes<kWarpLanes>(values[i]);
      if (lane == 0) partials_[buffer_][i][warp] = values[i];
    }
    Group::synchronise();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      // Few partials: every thread reads them all (a broadcast). Many: one per lane, then a butterfly.
      if constexpr (kWarps <= 16) {
        constexpr int kChains = kWarps < 4 ? 1 : 4;  // sums that do not wait for each other
        float chains[kChains] = {};
#pragma unroll
        for (int other = 0; other < kWarps; ++other) chains[other % kChains] += partials_[buffer_][i][other];
        values[i] = kChains == 1 ? chains[0] : (chains[0] + chains[1]) + (chains[kChains - 2] + chains[kChains - 1]);
      } else {
        values[i] = sum_lanes<kWarps>(partials_[buffer_][i][lane % kWarps]);
      }
    }
    buffer_ ^= 1;
  }

 private:
  float (&partials_)[2][kValues][kWarps];
  int buffer_ = 0;
};

// Over the blocks of a cluster through distributed shared memory (sm_90): every warp sends its partial straight to
// every block with st.async, each block's mbarrier counts the bytes in, and no thread waits for anything else.
template <int kWarps, int kValues>
class ClusterSum {
  static_assert(kValues == 1 || kValues == 2, "st.async carries 4 or 8 bytes");

 public:
  struct Storage {
    Barrier arrived[2];
    alignas(16) float partials[2][kMaxClusterBlocks * kWarps][kValues];
  };
  // Synchronises the cluster: no block may send before every barrier stands.
  __device__ __forceinline__ explicit ClusterSum(Storage& storage)
      : storage_(storage), blocks_(ptx::cluster_nctarank()), rank_(ptx::cluster_ctarank()) {
    if (threadIdx.x == 0) {
      storage.arrived[0].init(1);
      storage.arrived[1].init(1);
    }
    __syncwarp();  // the cluster's barrier wants whole warps
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    const int lane = threadIdx.x % kWarpLanes;
    target_ = ptx::mapa_shared_cluster(ptx::shared_address(&storage), lane < blocks_ ? lane : 0);
  }

  __device__ __forceinline__ int parts() const { return blocks_ * kWarps; }

  // Every warp's values, by block and then warp, in every block. `values` are the same in all lanes of a warp. Returns
  // after every thread of every block of the cluster has entered this call; what it returns holds until the next but
  // one.
  __device__ __forceinline__ const float (
      &exchange(const float (&values)[kValues]))[kMaxClusterBlocks * kWarps][kValues] {
    const int warp = threadIdx.x / kWarpLanes;
    const int lane = threadIdx.x % kWarpLanes;
    if (threadIdx.x == 0) {
      storage_.arrived[state_.stage].arrive_expect_bytes(blocks_ * kWarps * kValues * sizeof(float));
    }
    if (lane < blocks_) send(values, rank_ * kWarps + warp);
    storage_.arrived[state_.stage].wait_cluster(state_.parity);
    const auto& received = storage_.partials[state_.stage];
    state_.advance(2);
    return received;
  }

  __device__ __forceinline__ void sum(float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = sum_lanes<kWarpLanes>(values[i]);
    const auto& received = exchange(values);
    float totals[kValues] = {};
    for (int other = threadIdx.x % kWarpLanes; other < parts(); other += kWarpLanes) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) totals[i] += received[other][i];
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = sum_lanes<kWarpLanes>(totals[i]);
  }

 private:
  __device__ __forceinline__ void send(const float (&values)[kValues], int slot) {
    const uint32_t base = ptx::shared_address(&storage_);
    const uint32_t slot_offset = ptx::shared_address(&storage_.partials[state_.stage][slot][0]) - base;
    const uint32_t barrier_offset = storage_.arrived[state_.stage].address() - base;
    if constexpr (kValues == 1) {
      ptx::st_async_shared_cluster_b32(target_ + slot_offset, __float_as_uint(values[0]), target_ + barrier_offset);
    } else {
      const uint64_t pair = __float_as_uint(values[0]) | static_cast<uint64_t>(__float_as_uint(values[1])) << 32;
      ptx::st_async_shared_cluster_b64(target_ + slot_offset, pair, target_ + barrier_offset);
    }
  }

  Storage& storage_;
  const int blocks_;
  const int rank_;
  uint32_t target_;
  PipelineState state_;
};

}  // namespace kernel_pytorch::tile
