// Products of groups of rows, cut at offsets that the device reads: a block finds its group, and the rest is that
// group's product as if there were no other. sm_80.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/mma/kernel.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh"

namespace kernel_pytorch::product {

// What a block works on; in shared memory.
struct GroupedTile {
  TileArguments product;  // of its group
  const int32_t* gather_a;
  const int32_t* gather_b;
  int32_t group, begin, end;  // group: -1 where the block has none
  int32_t tile;               // along m; without a group how many tiles lie before it
  int32_t warp_sums[kTileThreads / 32];
};

// Offsets beyond the rows are clamped: nobody but the device has read them.
__device__ __forceinline__ int32_t group_end(const GroupedTileArguments& given, int32_t group) {
  return min(max(given.offsets[group], 0), given.by_depth ? given.product.k : given.product.m);
}
__device__ __forceinline__ int32_t group_begin(const GroupedTileArguments& given, int32_t group) {
  return group == 0 ? 0 : group_end(given, group - 1);
}

// Tiles of `edge` rows are counted group by group; a thread has four neighbouring groups.
__device__ __forceinline__ void find_group(const GroupedTileArguments& given, GroupedTile& own, int32_t tile,
                                           int32_t edge) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), first = 4 * thread;
  const auto tiles_of = [&](int32_t group) {
    return group < given.groups ? (max(group_end(given, group) - group_begin(given, group), 0) + edge - 1) / edge : 0;
  };
  int32_t sum = 0;
  for (int32_t group = first; group < first + 4; ++group) sum += tiles_of(group);
  int32_t ahead = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, ahead, distance);
    if (thread % 32 >= distance) ahead += other;
  }
  if (thread % 32 == 31) own.warp_sums[thread / 32] = ahead;
  if (thread == 0) own.group = -1;
  __syncthreads();
  int32_t total = 0;
  for (int i = 0; i < kTileThreads / 32; ++i) {
    if (i < thread / 32) ahead += own.warp_sums[i];
    total += own.warp_sums[i];
  }
  int32_t next = ahead - sum;
  for (int32_t group = first; group < first + 4; ++group) {
    const int32_t count = tiles_of(group);
    if (tile >= next && tile < next + count) {
      own.group = group;
      own.tile = tile - next;
    }
    next += count;
  }
  if (thread == 0 && tile >= total) own.tile = total;
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void advance(const T*& pointer, int64_t elements, int64_t bytes) {
  if (pointer != nullptr)
    pointer = reinterpret_cast<const T*>(reinterpret_cast<const char*>(pointer) + elements * bytes);
}
__device__ __forceinline__ void advance(TileMatrix& matrix, int64_t elements) {
  if (matrix.data == nullptr) return;
  matrix.data = static_cast<char*>(matrix.data) + elements * (matrix.type == TileType::kFloat32 ? 4 : 2);
}

// By one thread: the group's own product. kBytes: of an element of a and b.
template <int kBytes>
__device__ __forceinline__ void take_group(const GroupedTileArguments& given, GroupedTile& own) {
  TileArguments& product = own.product;
  product = given.product;
  own.gather_a = given.gather_a;
  own.gather_b = given.gather_b;
  const int32_t group = own.group;
  own.begin = group_begin(given, group);
  own.end = max(group_end(given, group), own.begin);
  if (given.by_depth) {
    product.k = own.end - own.begin;
    advance(own.gather_a, own.begin, 4);
    advance(own.gather_b, own.begin, 4);
    if (given.gather_a == nullptr) {
      product.a.data = static_cast<const char*>(product.a.data) + own.begin * product.a.inner * kBytes;
    }
    if (given.gather_b == nullptr) {
      product.b.data = static_cast<const char*>(product.b.data) + own.begin * product.b.inner * kBytes;
    }
    advance(product.output, group * product.output.batch);
  } else {
    product.m = own.end - own.begin;
    advance(own.gather_a, own.begin, 4);
    if (given.gather_a == nullptr) {
      product.a.data = static_cast<const char*>(product.a.data) + own.begin * product.a.outer * kBytes;
    }
    product.b.data = static_cast<const char*>(product.b.data) + group * product.b.batch * kBytes;
    advance(product.bias, group * given.bias_stride);
    advance(product.output, own.begin * product.output.row);
    advance(product.preactivation, own.begin * product.preactivation.row);
  }
  product.a.batch = product.b.batch = product.output.batch = product.preactivation.batch = 0;
}

// Rows behind the last group are zeros.
__device__ __forceinline__ void clear_rows(const GroupedTileArguments& given, const GroupedTile& own, int32_t tile,
                                           int32_t edge, int32_t first_column) {
  const int32_t end = given.groups == 0 ? 0 : group_end(given, given.groups - 1);
  const int32_t first = end + (tile - own.tile) * edge;
  for (int32_t index = static_cast<int32_t>(threadIdx.x); index < edge * edge; index += kTileThreads) {
    const int32_t row = first + index / edge, column = first_column + index % edge;
    if (row >= given.product.m || column >= given.product.n) continue;
    for (const TileMatrix* matrix : {&given.product.output, &given.product.preactivation}) {
      if (matrix->data != nullptr) store_any(*matrix, row * matrix->row + column, 0.0f);
    }
  }
}

// Whether the block has a tile to compute; `own` then describes it.
template <int kBytes>
__device__ __forceinline__ bool begin_tile(const GroupedTileArguments& given, GroupedTile& own, int32_t edge) {
  const int32_t tile = static_cast<int32_t>(blockIdx.y);
  if (given.by_depth) {
    if (threadIdx.x == 0) {
      own.group = static_cast<int32_t>(blockIdx.z);
      own.tile = tile;
    }
    __syncthreads();
  } else {
    find_group(given, own, tile, edge);
  }
  if (own.group < 0) {
    clear_rows(given, own, tile, edge, static_cast<int32_t>(blockIdx.x) * edge);
    return false;
  }
  if (threadIdx.x == 0) take_group<kBytes>(given, own);
  __syncthreads();
  return true;
}

template <class T, bool kAcrossA, bool kAcrossB>
__global__ void __launch_bounds__(kTileThreads, 2) mma_grouped(const __grid_constant__ GroupedTileArguments given) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ GroupedTile own;
  if (!begin_tile<2>(given, own, kMmaEdge)) return;
  mma_tile<T, kAcrossA, kAcrossB, true>(own.product, own.tile * kMmaEdge, static_cast<int32_t>(blockIdx.x) * kMmaEdge,
                                        memory, own.gather_a, own.gather_b);
}

template <class T>
__global__ void __launch_bounds__(kTileThreads, 2) tile_grouped(const __grid_constant__ GroupedTileArguments given) {
  using Product = TileProduct<T, T, 4, false, true>;
  constexpr int kTile = tile_edge(4);
  __shared__ typename Product::Shared shared;
  __shared__ GroupedTile own;
  if (!begin_tile<sizeof(T)>(given, own, kTile)) return;
  Product(own.product, shared, own.tile * kTile, static_cast<int32_t>(blockIdx.x) * kTile,
          {own.gather_a, given.by_depth}, {own.gather_b, given.by_depth})
      .run();
}

}  // namespace kernel_pytorch::product
