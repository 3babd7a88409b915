// Probe kernels of words_test.cpp: each runs a few words of ptx/ and tile/ so that the host can compare values.
#pragma once

#include "kernel_pytorch/cuda/ptx/cluster.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"

namespace kernel_pytorch::primitives_probe {

// bits[i] = values[i] as T, one element at a time and by whole vectors; count is a multiple of a vector.
template <class T>
__global__ void from_floats(const float* values, T* scalars, T* vectors, int count) {
  constexpr int kCount = tile::Vector<T>::kCount;
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * kCount;
  if (first >= count) return;
  float group[kCount];
  for (int i = 0; i < kCount; ++i) {
    group[i] = values[first + i];
    scalars[first + i] = tile::from_float<T>(values[first + i]);
  }
  ptx::st_global_v4(vectors + first, tile::Vector<T>::pack(group).words);
}

template <class T>
__global__ void to_floats(const T* elements, float* scalars, float* vectors, int count) {
  constexpr int kCount = tile::Vector<T>::kCount;
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * kCount;
  if (first >= count) return;
  float group[kCount];
  tile::load_shared_by_all<T>(elements + first).unpack(group);
  for (int i = 0; i < kCount; ++i) {
    vectors[first + i] = group[i];
    scalars[first + i] = tile::to_float<T>(elements[first + i]);
  }
}

// Copies through one pair of load and store words, by way of shared memory.
enum class Way { kNoAllocate, kHintFirst, kHintNormal, kCached, kPlain };

template <Way kWay>
__global__ void copy_vectors(const ptx::Word4* source, ptx::Word4* target, int count) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t slot = ptx::shared_address(memory) + threadIdx.x * tile::kVectorBytes;
  const uint64_t policy = tile::make_policy(kWay == Way::kHintFirst ? tile::Keep::kEvictFirst : tile::Keep::kNormal);
  ptx::Word4 value;
  if constexpr (kWay == Way::kNoAllocate) value = ptx::ld_global_nc_l1_no_allocate_v4(source + i);
  if constexpr (kWay == Way::kHintFirst || kWay == Way::kHintNormal) {
    value = tile::load_once<float>(source + i, policy).words;
  }
  if constexpr (kWay == Way::kCached) value = ptx::ld_global_nc_v4(source + i);
  if constexpr (kWay == Way::kPlain) value = ptx::ld_global_v4(source + i);
  ptx::st_shared_v4(slot, value);
  const float head = ptx::ld_shared_f32(slot);
  ptx::st_shared_f32(slot, head);
  value = tile::load_from_shared<float>(slot).words;
  if constexpr (kWay == Way::kHintFirst || kWay == Way::kHintNormal) {
    tile::store(target + i, tile::Vector<float>{value}, policy);
  } else {
    ptx::st_global_v4(target + i, value);
  }
}

template <int kLanes>
__global__ void sum_lanes(const float* values, float* totals) {
  totals[threadIdx.x] = tile::sum_lanes<kLanes>(values[threadIdx.x]);
}

// `rounds` sums in a row, each over values scaled by the round: a buffer used too early would mix rounds.
template <int kWarps, int kValues>
__global__ void sum_block(const float* values, float* totals, int rounds) {
  using Sum = tile::BlockSum<kWarps, kValues>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);
  for (int round = 0; round < rounds; ++round) {
    float parts[kValues];
    for (int i = 0; i < kValues; ++i) parts[i] = values[threadIdx.x] * (round + 1 + i);
    sum.sum(parts);
    for (int i = 0; i < kValues; ++i) totals[(round * kValues + i) * blockDim.x + threadIdx.x] = parts[i];
  }
}

template <int kWarps, int kValues>
__global__ void sum_cluster(const float* values, float* totals, int rounds) {
  using Sum = tile::ClusterSum<kWarps, kValues>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    float parts[kValues];
    for (int i = 0; i < kValues; ++i) parts[i] = values[thread] * (round + 1 + i);
    sum.sum(parts);
    for (int i = 0; i < kValues; ++i) totals[(round * kValues + i) * gridDim.x * blockDim.x + thread] = parts[i];
  }
}

// Every thread leaves a word for its neighbour and arrives; the wait must show all of them, phase after phase.
template <int kThreads>
__global__ void pass_around(int32_t* words, int rounds) {
  __shared__ tile::Barrier barrier;
  __shared__ int32_t slots[2][kThreads];
  if (threadIdx.x == 0) barrier.init(kThreads);
  __syncthreads();
  int32_t word = threadIdx.x;
  for (int round = 0; round < rounds; ++round) {
    slots[round % 2][(threadIdx.x + 1) % kThreads] = word;
    barrier.arrive();
    barrier.wait(round % 2);
    word = slots[round % 2][threadIdx.x];
  }
  words[threadIdx.x] = word;
}

// target = source + 1 by tiles through a ring of stages that bulk copies fill.
template <int kThreads>
__global__ void stream_tiles(const int32_t* source, int32_t* target, int tiles, int stages) {
  constexpr int kTileBytes = kThreads * sizeof(int32_t);
  __shared__ tile::Barrier full[4];
  __shared__ alignas(128) int32_t ring[4][kThreads];
  const uint64_t policy = tile::make_policy(tile::Keep::kNormal);
  const auto request = [&](int tile_index, int stage) {
    full[stage].arrive_expect_bytes(kTileBytes);
    const uint32_t slot = ptx::shared_address(ring[stage]);
    if (tile_index % 2 == 0) {
      tile::copy_to_shared(slot, source + tile_index * kThreads, kTileBytes, full[stage], policy);
    } else {
      ptx::cp_async_bulk_shared_global(slot, source + tile_index * kThreads, kTileBytes, full[stage].address());
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) full[stage].init(1);
    for (int stage = 0; stage < stages && stage < tiles; ++stage) request(stage, stage);
  }
  __syncthreads();
  tile::PipelineState state;
  for (int i = 0; i < tiles; ++i) {
    full[state.stage].wait(state.parity);
    const int32_t value = ring[state.stage][threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0 && i + stages < tiles) request(i + stages, state.stage);
    target[i * kThreads + threadIdx.x] = value + 1;
    state.advance(stages);
  }
}

// Per block: rank, blocks of the cluster, cluster, clusters. A template, since other probes are compiled for sm_80.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) count_clusters(uint32_t* results) {
  if (threadIdx.x != 0) return;
  uint32_t* result = results + blockIdx.x * 4;
  result[0] = ptx::cluster_ctarank();
  result[1] = ptx::cluster_nctarank();
  result[2] = ptx::clusterid_x();
  result[3] = ptx::nclusterid_x();
}

// Lets the next kernel start at once, then works a while and stores: the next one must still see the stores.
__global__ void write_late(int32_t* values, int32_t value) {
  tile::let_next_kernel_start();
  const long long start = clock64();
  while (clock64() - start < 200000) {
  }
  values[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
__global__ void read_after(const int32_t* values, int32_t* copies) {
  tile::wait_for_earlier_kernels();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  copies[i] = values[i];
}

}  // namespace kernel_pytorch::primitives_probe
