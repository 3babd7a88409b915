// Cross entropy of wide rows in one visit: a row lies over the shared memory of a cluster's blocks, where one warp of
// each keeps the rows to come while the others work on the present one. They read their slice twice from shared
// memory, largest and sum first, gradient second, and meet the other blocks once in between. Two blocks on a
// multiprocessor fill each other's waits. No softcap, label smoothing or partials. sm_90; rows start at multiples of 16
// bytes and are a multiple of them long.
#pragma once

#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/ops/cross_entropy/cuda/parts.cuh"

namespace kernel_pytorch::cross_entropy {

// This block's part of every row.
template <class T>
struct Slice {
  static constexpr int kCount = tile::Vector<T>::kCount;
  int first_vector;
  int vectors;

  __device__ __forceinline__ explicit Slice(const Arguments& arguments) {
    const int row_vectors = static_cast<int>(arguments.shape.columns / kCount);
    first_vector = min(static_cast<int>(ptx::cluster_ctarank()) * arguments.slice_vectors, row_vectors);
    vectors = min(arguments.slice_vectors, row_vectors - first_vector);
  }
  __device__ __forceinline__ int first_column() const { return first_vector * kCount; }
  __device__ __forceinline__ bool holds(int column) const {
    return column >= first_column() && column < first_column() + vectors * kCount;
  }
};

struct ClusterBarriers {
  tile::Barrier full[kMaxStages];
  tile::Barrier empty[kMaxStages];
};

// The producer: one lane of a warp requests rows while stages are free.
template <class T>
__device__ __forceinline__ void fetch_rows(const Arguments& arguments, const Slice<T>& slice, unsigned char* ring,
                                           ClusterBarriers& barriers) {
  const uint64_t policy = tile::make_policy(tile::Keep::kEvictFirst);
  const uint32_t bytes = slice.vectors * tile::kVectorBytes;
  tile::PipelineState state;
  uint32_t free_parity = 1;  // a fresh barrier's earlier phase: every stage is free at first
  for (int64_t row = ptx::clusterid_x(); row < arguments.shape.rows; row += ptx::nclusterid_x()) {
    if (target_at(arguments, row) == arguments.ignore_index) continue;
    barriers.empty[state.stage].wait(free_parity);
    barriers.full[state.stage].arrive_expect_bytes(bytes);
    if (bytes != 0) {
      const char* source = static_cast<const char*>(arguments.logits.data) +
                           row * arguments.logits.leading_strides[0] * static_cast<int64_t>(sizeof(T)) +
                           static_cast<int64_t>(slice.first_vector) * tile::kVectorBytes;
      const uint32_t target =
          ptx::shared_address(ring) + static_cast<uint32_t>(state.stage) * arguments.slice_vectors * tile::kVectorBytes;
      tile::copy_to_shared(target, source, bytes, barriers.full[state.stage], policy);
    }
    state.advance(arguments.stages);
    free_parity = state.parity ^ 1;
  }
}

template <class T, ClusterConfig kConfig>
__device__ __forceinline__ Running<T, false> reduce_slice(const Arguments& arguments, const Slice<T>& slice,
                                                          uint32_t stage) {
  Running<T, false> running;
  const int64_t first_column = arguments.first_column + slice.first_column();
#pragma unroll 2
  for (int vector = threadIdx.x; vector < slice.vectors; vector += kConfig.consumers) {
    running.add(arguments, tile::load_from_shared<T>(stage + vector * tile::kVectorBytes),
                first_column + vector * Slice<T>::kCount);
  }
  return running;
}

template <class T, ClusterConfig kConfig>
__device__ __forceinline__ void write_slice(const Arguments& arguments, const Slice<T>& slice, uint32_t stage,
                                            const Coefficients& by, int target_column, T* gradient, uint64_t policy) {
#pragma unroll 2
  for (int vector = threadIdx.x; vector < slice.vectors; vector += kConfig.consumers) {
    const int column = slice.first_column() + vector * Slice<T>::kCount;
    const tile::Vector<T> logits = tile::load_from_shared<T>(stage + vector * tile::kVectorBytes);
    tile::store(gradient + column, by.apply<T, false>(arguments, logits, column, target_column), policy);
  }
}

template <class T, ClusterConfig kConfig>
__device__ __forceinline__ void work_on_rows(const Arguments& arguments, const Whole& whole, const Slice<T>& slice,
                                             unsigned char* ring, ClusterBarriers& barriers,
                                             tile::ClusterMaxSum<kConfig.consumers / tile::kWarpLanes>& totals_of) {
  const uint64_t policy = tile::make_policy(tile::Keep::kEvictFirst);
  tile::PipelineState state;
  for (int64_t row = ptx::clusterid_x(); row < arguments.shape.rows; row += ptx::nclusterid_x()) {
    const Target target(arguments, row);
    T* gradient =
        arguments.gradient == nullptr ? nullptr : static_cast<T*>(arguments.gradient) + row * arguments.shape.columns;
    if (target.is_ignored) {
      if (threadIdx.x == 0 && slice.first_vector == 0) store_ignored_row(arguments, row);
      for (int vector = threadIdx.x; gradient != nullptr && vector < slice.vectors; vector += kConfig.consumers) {
        tile::store(gradient + slice.first_column() + vector * Slice<T>::kCount, tile::Vector<T>::zero(), policy);
      }
      continue;
    }
    const uint32_t stage =
        ptx::shared_address(ring) + static_cast<uint32_t>(state.stage) * arguments.slice_vectors * tile::kVectorBytes;
    const float on_target = target.weight<T>(arguments);
    barriers.full[state.stage].wait(state.parity);
    const Running<T, false> running = reduce_slice<T, kConfig>(arguments, slice, stage);
    const tile::MaxSum totals = totals_of.merge(tile::merge_lanes<tile::kWarpLanes>(running.totals));
    // The block that holds the target has its logit at hand; where no block does, the first one stores the row.
    const bool is_elsewhere = target.column < 0;
    if (threadIdx.x == 0 && (is_elsewhere ? slice.first_vector == 0 : slice.holds(target.column))) {
      float own = 0;
      if (!is_elsewhere) {
        const T* logits = reinterpret_cast<const T*>(ring + static_cast<int64_t>(state.stage) *
                                                                arguments.slice_vectors * tile::kVectorBytes);
        own = tile::to_float<T>(logits[target.column - slice.first_column()]);
      }
      store_row(arguments, whole, row, on_target, own, totals, running.weighted);
    }
    if (gradient != nullptr) {
      const Coefficients by = forward_coefficients(arguments, whole, on_target, totals);
      write_slice<T, kConfig>(arguments, slice, stage, by, target.column, gradient, policy);
    }
    __syncwarp();
    if (threadIdx.x % tile::kWarpLanes == 0) barriers.empty[state.stage].arrive();
    state.advance(arguments.stages);
  }
}

template <class T, ClusterConfig kConfig>
__global__ void __launch_bounds__(kConfig.consumers + kFetchThreads, kConfig.blocks)
    cluster_rows(const __grid_constant__ Arguments arguments) {
  static_assert(is_legal(kConfig));
  constexpr int kWarps = kConfig.consumers / tile::kWarpLanes;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ ClusterBarriers barriers;
  __shared__ typename tile::ClusterMaxSum<kWarps>::Storage totals_storage;
  __shared__ Sum<T> shared[kWarps + 1];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < arguments.stages; ++stage) {
      barriers.full[stage].init(1);
      barriers.empty[stage].init(kWarps);
    }
  }
  __syncthreads();
  tile::ClusterMaxSum<kWarps> totals(totals_storage);
  const Whole whole = Whole::make<T>(arguments, shared);
  const Slice<T> slice(arguments);
  if (threadIdx.x >= kConfig.consumers) {
    if (threadIdx.x == kConfig.consumers) fetch_rows<T>(arguments, slice, ring, barriers);
    __syncwarp();
  } else {
    work_on_rows<T, kConfig>(arguments, whole, slice, ring, barriers, totals);
  }
  store_total<T>(arguments, whole, shared);
}

}  // namespace kernel_pytorch::cross_entropy
