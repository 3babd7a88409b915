// Cross entropy with a row on a warp or a block, for every width, stride and alignment. The row is visited twice, the
// second time from shared memory as far as the row fits there, and from L2. Elements before the
// first and after the last whole vector go one by one, which is also the way of rows without vectors.
#pragma once

#include "kernel_pytorch/ops/cross_entropy/cuda/parts.cuh"

namespace kernel_pytorch::cross_entropy {

// Vectors that a thread has under way. For sm_100 the assembler needs more registers around them, and would spill.
#if __CUDA_ARCH__ >= 1000
inline constexpr int kMostAhead = 2;
#else
inline constexpr int kMostAhead = 4;
#endif
template <bool kGeneral, int kRowThreads>
inline constexpr int kAhead = kGeneral                          ? 1
                              : kRowThreads == tile::kWarpLanes ? 2
                                                                : kMostAhead;
inline constexpr int kWarpRowThreads = 256;  // of a block whose warps each take a row

// A block that has its multiprocessor to itself keeps what it can of its row: L2 does not hold the rows of all blocks.
// Not on sm_100, whose L2 is larger, and where the assembler would spill.
template <int kRowThreads>
#if __CUDA_ARCH__ >= 1000
inline constexpr bool kHolds = false;
#else
inline constexpr bool kHolds = kRowThreads == kThreadsOnMultiprocessor;
#endif
template <int kRowThreads>
inline constexpr int kBlockThreads = kRowThreads == tile::kWarpLanes ? kWarpRowThreads : kRowThreads;

// One row, seen by one of its threads.
template <class T>
struct RowView {
  static constexpr int kCount = tile::Vector<T>::kCount;
  const T* logits;
  T* gradient;
  int64_t stride;
  int columns;
  int head = 0;     // elements before the first vector
  int vectors = 0;  // and after the last one again elements

  __device__ __forceinline__ RowView(const Arguments& arguments, int64_t row)
      : logits(static_cast<const T*>(arguments.logits.data) + any_row_offset(arguments.logits, arguments.shape, row)),
        gradient(static_cast<T*>(arguments.gradient) + row * arguments.shape.columns),
        stride(arguments.logits.column_stride),
        columns(static_cast<int>(arguments.shape.columns)) {
    if (!arguments.has_vectors) return;
    const uint32_t past = static_cast<uint32_t>(reinterpret_cast<uint64_t>(logits)) % tile::kVectorBytes;
    head = min(past == 0 ? 0 : static_cast<int>((tile::kVectorBytes - past) / sizeof(T)), columns);
    vectors = (columns - head) / kCount;
  }
  __device__ __forceinline__ int edges() const { return columns - vectors * kCount; }
  __device__ __forceinline__ int edge_column(int i) const { return i < head ? i : i + vectors * kCount; }
  __device__ __forceinline__ float logit(int column, float softcap) const {
    const float value = tile::to_float<T>(logits[column * stride]);
    return softcap == 0 ? value : cap(value, softcap);
  }
};

// Calls body(vector, index) for the thread's vectors from `begin`, a multiple of the row's threads, to `end`: several
// of them loaded ahead by load(index), in a fixed order.
template <class T, int kRowThreads, int kAhead, class Load, class Body>
__device__ __forceinline__ void for_vectors(int begin, int end, int lane, const Load& load, const Body& body) {
  for (int first = begin + lane; first < end; first += kAhead * kRowThreads) {
    tile::Vector<T> loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int vector = first + i * kRowThreads;
      if (vector < end) loaded[i] = load(vector);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int vector = first + i * kRowThreads;
      if (vector < end) body(loaded[i], vector);
    }
  }
}
template <class T>
__device__ __forceinline__ auto from_global(const RowView<T>& row, uint64_t policy) {
  const T* start = row.logits + row.head;
  return [start, policy](int vector) -> tile::Vector<T> {
    return {ptx::ld_global_l1_no_allocate_l2_cache_hint_v4(start + static_cast<int64_t>(vector) * RowView<T>::kCount,
                                                           policy)};
  };
}

// Vectors of a row that its threads leave in shared memory for their second visit: the first ones, as many as there is
// room for. A thread reads only what it wrote itself.
struct Held {
  uint32_t address;
  int vectors;
};

template <class T, bool kGeneral, int kRowThreads>
__device__ __forceinline__ Running<T, kGeneral> reduce(const Arguments& arguments, const RowView<T>& row, int lane,
                                                       uint64_t policy, const Held& held) {
  constexpr int kInFlight = kAhead<kGeneral, kRowThreads>;
  Running<T, kGeneral> running;
  const auto load = from_global(row, policy);
  const auto add = [&](const tile::Vector<T>& loaded, int vector) {
    running.add(arguments, loaded, arguments.first_column + row.head + vector * RowView<T>::kCount);
  };
  if constexpr (kHolds<kRowThreads>) {
    for_vectors<T, kRowThreads, kInFlight>(0, held.vectors, lane, load, [&](const tile::Vector<T>& loaded, int vector) {
      ptx::st_shared_v4(held.address + vector * tile::kVectorBytes, loaded.words);
      add(loaded, vector);
    });
  }
  for_vectors<T, kRowThreads, kInFlight>(kHolds<kRowThreads> ? held.vectors : 0, row.vectors, lane, load, add);
  for (int i = lane; i < row.edges(); i += kRowThreads) {
    const int column = row.edge_column(i);
    running.add_one(arguments, row.logit(column, arguments.softcap), arguments.first_column + column);
  }
  return running;
}

template <class T, bool kGeneral, int kRowThreads>
__device__ __forceinline__ void write_gradient(const Arguments& arguments, const RowView<T>& row,
                                               const Coefficients& by, int target_column, int lane, uint64_t policy,
                                               const Held& held) {
  constexpr int kInFlight = kAhead<kGeneral, kRowThreads>;
  const auto write = [&](const tile::Vector<T>& loaded, int vector) {
    const int column = row.head + vector * RowView<T>::kCount;
    tile::store(row.gradient + column, by.apply<T, kGeneral>(arguments, loaded, column, target_column), policy);
  };
  // The rest first: L2 has it for a while only.
  for_vectors<T, kRowThreads, kInFlight>(kHolds<kRowThreads> ? held.vectors : 0, row.vectors, lane,
                                         from_global(row, policy), write);
  if constexpr (kHolds<kRowThreads>) {
    for_vectors<T, kRowThreads, kInFlight>(
        0, held.vectors, lane,
        [&](int vector) { return tile::load_from_shared<T>(held.address + vector * tile::kVectorBytes); }, write);
  }
  for (int i = lane; i < row.edges(); i += kRowThreads) {
    const int column = row.edge_column(i);
    row.gradient[column] = by.apply_one<T>(arguments, row.logit(column, arguments.softcap), column, target_column);
  }
}

template <class T, int kRowThreads>
__device__ __forceinline__ void zero_gradient(const RowView<T>& row, int lane, uint64_t policy) {
  for (int vector = lane; vector < row.vectors; vector += kRowThreads) {
    tile::store(row.gradient + row.head + vector * RowView<T>::kCount, tile::Vector<T>::zero(), policy);
  }
  for (int i = lane; i < row.edges(); i += kRowThreads) {
    row.gradient[row.edge_column(i)] = tile::from_float<T>(0.0f);
  }
}

// Totals over the threads of a row; every thread receives them.
template <int kRowThreads>
class RowTotals {
 public:
  struct Storage {
    typename tile::BlockMaxSum<kRowThreads / tile::kWarpLanes>::Storage totals;
    typename tile::BlockSum<kRowThreads / tile::kWarpLanes, 1>::Storage sums;
  };
  __device__ __forceinline__ explicit RowTotals(Storage& storage) : totals_(storage.totals), sums_(storage.sums) {}
  __device__ __forceinline__ tile::MaxSum merge(tile::MaxSum own) {
    return totals_.merge(tile::merge_lanes<tile::kWarpLanes>(own));
  }
  __device__ __forceinline__ float sum(float value) {
    float values[1] = {value};
    sums_.sum(values);
    return values[0];
  }

 private:
  tile::BlockMaxSum<kRowThreads / tile::kWarpLanes> totals_;
  tile::BlockSum<kRowThreads / tile::kWarpLanes, 1> sums_;
};
template <>
class RowTotals<tile::kWarpLanes> {
 public:
  struct Storage {};
  __device__ __forceinline__ explicit RowTotals(Storage&) {}
  __device__ __forceinline__ tile::MaxSum merge(tile::MaxSum own) { return tile::merge_lanes<tile::kWarpLanes>(own); }
  __device__ __forceinline__ float sum(float value) { return tile::sum_lanes<tile::kWarpLanes>(value); }
};

template <class T, bool kGeneral, int kRowThreads>
__global__ void __launch_bounds__(kBlockThreads<kRowThreads>, kThreadsOnMultiprocessor / kBlockThreads<kRowThreads>)
    block_rows(const __grid_constant__ Arguments arguments) {
  constexpr int kRows = kBlockThreads<kRowThreads> / kRowThreads;
  extern __shared__ __align__(16) unsigned char row_part[];
  __shared__ typename RowTotals<kRowThreads>::Storage storage;
  __shared__ Sum<T> shared[kBlockThreads<kRowThreads> / tile::kWarpLanes];
  RowTotals<kRowThreads> totals_of(storage);
  const Whole whole = Whole::make<T>(arguments, shared);
  const int lane = threadIdx.x % kRowThreads;
  const uint64_t keep = tile::make_policy(tile::Keep::kNormal);
  const uint64_t pass = tile::make_policy(tile::Keep::kEvictFirst);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads; row < arguments.shape.rows;
       row += static_cast<int64_t>(gridDim.x) * kRows) {
    const Target target(arguments, row);
    const RowView<T> view(arguments, row);
    if (target.is_ignored) {
      if (lane == 0) store_ignored_row(arguments, row);
      if (arguments.gradient != nullptr) zero_gradient<T, kRowThreads>(view, lane, pass);
      continue;
    }
    const float on_target = target.weight<T>(arguments);
    Held held{ptx::shared_address(row_part), min(arguments.held_vectors, view.vectors / kRowThreads * kRowThreads)};
    Coefficients by;
    if (arguments.given_lse != nullptr) {
      by = backward_coefficients(arguments, whole, on_target, row);
      held.vectors = 0;
    } else {
      // The target's logit before anybody overwrites it in place.
      const float own = lane == 0 && target.column >= 0 ? view.logit(target.column, arguments.softcap) : 0.0f;
      const Running<T, kGeneral> running =
          reduce<T, kGeneral, kRowThreads>(arguments, view, lane, arguments.gradient != nullptr ? keep : pass, held);
      const tile::MaxSum totals = totals_of.merge(running.totals);
      const float weighted = kGeneral ? totals_of.sum(running.weighted) : 0.0f;
      if (lane == 0) store_row(arguments, whole, row, on_target, own, totals, weighted);
      by = forward_coefficients(arguments, whole, on_target, totals);
    }
    if (arguments.gradient != nullptr) {
      write_gradient<T, kGeneral, kRowThreads>(arguments, view, by, target.column, lane, pass, held);
    }
  }
  store_total<T>(arguments, whole, shared);
}

// The mean's divisor, where there are too many rows for every block to count them.
template <class T>
__global__ void __launch_bounds__(kCountThreads, 1)
    count_rows(const __grid_constant__ Arguments arguments, double* counted) {
  __shared__ Sum<T> shared[kCountThreads / tile::kWarpLanes];
  const Sum<T> divisor = count_targets<T>(arguments, shared);
  if (threadIdx.x == 0) *counted = divisor;
}

// tensor *= scale, unless that is 1: then the launch is all it costs.
template <class T>
__global__ void __launch_bounds__(kRescaleThreads, 4) rescale(const __grid_constant__ RescaleArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  const float scale = *arguments.scale;
  if (scale == 1.0f) return;
  T* tensor = static_cast<T*>(arguments.tensor);
  const uint64_t policy = tile::make_policy(tile::Keep::kEvictFirst);
  const bool is_aligned = reinterpret_cast<uint64_t>(tensor) % tile::kVectorBytes == 0;
  const int64_t vectors = is_aligned ? arguments.elements / kCount : 0;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kRescaleThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kRescaleThreads;
  for (int64_t first = thread; first < vectors; first += kRescaleVectors * threads) {
    tile::Vector<T> loaded[kRescaleVectors];
#pragma unroll
    for (int i = 0; i < kRescaleVectors; ++i) {
      const int64_t vector = first + i * threads;
      if (vector < vectors) {
        loaded[i] = {ptx::ld_global_l1_no_allocate_l2_cache_hint_v4(tensor + vector * kCount, policy)};
      }
    }
#pragma unroll
    for (int i = 0; i < kRescaleVectors; ++i) {
      const int64_t vector = first + i * threads;
      if (vector >= vectors) continue;
      float values[kCount];
      loaded[i].unpack(values);
#pragma unroll
      for (float& value : values) value *= scale;
      tile::store(tensor + vector * kCount, tile::Vector<T>::pack(values), policy);
    }
  }
  for (int64_t i = vectors * kCount + thread; i < arguments.elements; i += threads) {
    tensor[i] = tile::from_float<T>(tile::to_float<T>(tensor[i]) * scale);
  }
}

}  // namespace kernel_pytorch::cross_entropy
