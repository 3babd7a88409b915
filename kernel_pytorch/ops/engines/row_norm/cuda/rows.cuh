// What forward and backward share: which part of which rows a thread owns, how it gets them into registers, and how the
// threads of a row sum. A row lies over lanes of a warp, a block, or the blocks of a cluster; nothing else differs.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/memory_pairs.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/cuda/tile/moments.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/row_norm/cuda/arguments_cuda.h"

namespace kernel_pytorch::row_norm {

template <RowConfig kConfig>
inline constexpr int kRowsPerBlock = kConfig.threads / kConfig.row_threads;

// The part of a row that this thread owns: vectors lane, lane + row_threads, ... of its block's slice.
template <RowConfig kConfig>
struct Place {
  int group;         // which row of the block's rows
  int lane;          // among the threads of the row in this block
  int vector_count;  // of the block's slice
  int first_vector;  // of the slice in the row
  int reach;         // from this thread's first vector to the end of the slice; not positive: it has none
  int64_t unit;      // which block (or cluster) among `units`
  int64_t units;

  __device__ __forceinline__ explicit Place(const RowShape& shape, int row_vectors) {
    group = kRowsPerBlock<kConfig> == 1 ? 0 : threadIdx.x / kConfig.row_threads;
    lane = threadIdx.x % kConfig.row_threads;
    first_vector = 0;
    vector_count = row_vectors;
    unit = blockIdx.x;
    units = gridDim.x;
    if constexpr (kConfig.clustered) {
      first_vector = min(static_cast<int>(ptx::cluster_ctarank()) * shape.slice_vectors, row_vectors);
      vector_count = min(shape.slice_vectors, row_vectors - first_vector);
      unit = ptx::clusterid_x();
      units = ptx::nclusterid_x();
    }
    reach = vector_count - lane;
  }

  __device__ __forceinline__ int vector(int i) const { return lane + i * kConfig.row_threads; }
  __device__ __forceinline__ bool owns(int i) const { return i * kConfig.row_threads < reach; }
  // Where the thread's first vector begins in a row, and how far its next one is.
  __device__ __forceinline__ int64_t first_byte() const {
    return static_cast<int64_t>(first_vector + lane) * tile::kVectorBytes;
  }
  static constexpr int kVectorStep = kConfig.row_threads * tile::kVectorBytes;
  __device__ __forceinline__ bool leads_row() const { return lane == 0 && first_vector == 0; }
  __device__ __forceinline__ int64_t first_row() const { return unit * kRowsPerBlock<kConfig>; }
  __device__ __forceinline__ int64_t row_step() const { return units * kRowsPerBlock<kConfig>; }
};

// Four of a vector's values in place.
template <int kCount>
__device__ __forceinline__ float (&four_of(float (&values)[kCount], int part))[4] {
  return reinterpret_cast<float(&)[4]>(values[part * 4]);
}

// Sums over all threads of a row.
template <RowConfig kConfig, int kValues>
class RowSum {
 public:
  struct Storage {};
  __device__ __forceinline__ explicit RowSum(Storage&) {}
  __device__ __forceinline__ void sum(float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = tile::sum_lanes<kConfig.row_threads>(values[i]);
  }
};
template <RowConfig kConfig, int kValues>
requires(kConfig.row_threads > tile::kWarpLanes && !kConfig.clustered) class RowSum<kConfig, kValues>
    : public tile::BlockSum<kConfig.row_threads / tile::kWarpLanes, kValues, kRowsPerBlock<kConfig>> {
  using tile::BlockSum<kConfig.row_threads / tile::kWarpLanes, kValues, kRowsPerBlock<kConfig>>::BlockSum;
};
template <RowConfig kConfig, int kValues>
requires(kConfig.clustered) class RowSum<kConfig, kValues>
    : public tile::ClusterSum<kConfig.threads / tile::kWarpLanes, kValues> {
  using tile::ClusterSum<kConfig.threads / tile::kWarpLanes, kValues>::ClusterSum;
};

// Mean and squared deviations over all threads of a row: within a warp in one pass around a pivot, across warps in one
// exchange.
template <class T, RowConfig kConfig>
class RowMoments {
 public:
  struct Storage {};
  __device__ __forceinline__ RowMoments(Storage&, const Place<kConfig>&, const RowShape&, int) {}
  // pivot() is taken of the first lane; sums_around(pivot), a tile::PivotSums, is this thread's.
  template <class Pivot, class SumsAround>
  __device__ __forceinline__ tile::Moments of(float inverse_count, Pivot pivot, SumsAround sums_around) {
    return tile::moments_of_lanes<kConfig.row_threads>(inverse_count, pivot, sums_around);
  }
};
template <class T, RowConfig kConfig>
requires(kConfig.row_threads > tile::kWarpLanes) class RowMoments<T, kConfig> {
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr int kWarps = kConfig.row_threads / tile::kWarpLanes;
  template <bool kClustered, class Unused>
  struct MergeOf {
    using Type = tile::BlockMoments<kWarps, kRowsPerBlock<kConfig>>;
  };
  template <class Unused>
  struct MergeOf<true, Unused> {
    using Type = tile::ClusterMoments<kWarps>;
  };
  using Merge = typename MergeOf<kConfig.clustered, void>::Type;

 public:
  using Storage = typename Merge::Storage;
  __device__ __forceinline__ RowMoments(Storage& storage, const Place<kConfig>& place, const RowShape& shape,
                                        int row_vectors)
      : merge_(storage, [&](int block, int warp) { return values_of_part(block, warp, shape, row_vectors); }) {
    const int block = kConfig.clustered ? place.first_vector / shape.slice_vectors : 0;
    const float count = values_of_part(block, place.lane / tile::kWarpLanes, shape, row_vectors);
    inverse_part_count_ = count > 0 ? __fdividef(1.0f, count) : 0.0f;
  }
  template <class Pivot, class SumsAround>
  __device__ __forceinline__ tile::Moments of(float inverse_count, Pivot pivot, SumsAround sums_around) {
    return merge_.merge(tile::moments_of_lanes<tile::kWarpLanes>(inverse_part_count_, pivot, sums_around),
                        inverse_count);
  }

 private:
  static __device__ __forceinline__ float values_of_part(int block, int warp, const RowShape& shape, int row_vectors) {
    const int slice =
        kConfig.clustered ? min(shape.slice_vectors, max(row_vectors - block * shape.slice_vectors, 0)) : row_vectors;
    int vectors = 0;
    for (int i = 0; i < kConfig.vectors; ++i) {
      vectors += min(max(slice - i * kConfig.row_threads - warp * tile::kWarpLanes, 0), tile::kWarpLanes);
    }
    return static_cast<float>(vectors * kCount);
  }

  Merge merge_;
  float inverse_part_count_;
};

// Four floats and the eight bytes that hold them as 16-bit values.
__device__ __forceinline__ ptx::Word2 narrowed(const float (&values)[4], MixedType type) {
  using PackedFp16 = tile::Word<tile::Float16>;
  using PackedBf16 = tile::Word<tile::BFloat16>;
  return type == MixedType::kFloat16 ? ptx::Word2{PackedFp16::pack(values), PackedFp16::pack(values + 2)}
                                     : ptx::Word2{PackedBf16::pack(values), PackedBf16::pack(values + 2)};
}
__device__ __forceinline__ ptx::Word4 widened(ptx::Word4 pairs, MixedType type) {
  float values[4];
  if (type == MixedType::kFloat16) {
    tile::Word<tile::Float16>::unpack(pairs.x, values);
    tile::Word<tile::Float16>::unpack(pairs.y, values + 2);
  } else {
    tile::Word<tile::BFloat16>::unpack(pairs.x, values);
    tile::Word<tile::BFloat16>::unpack(pairs.y, values + 2);
  }
  return tile::Vector<float>::pack(values).words;
}

// Brings rows of kTensors tensors into registers: take() once per row, then stage_is_free() once every thread of the
// block is known to have taken it (after the first sum over the row). If rows are fp32, the tensor kMixedTensor may
// have a 16-bit type: its vectors are eight bytes in memory and are widened when the row is taken. kStrided: rows lie
// along three dimensions, each with its stride.
template <class T, int kTensors, RowConfig kConfig, int kMixedTensor = -1, bool kStrided = false>
class RowReader {
 public:
  using Vector = tile::Vector<T>;
  using Row = Vector[kTensors][kConfig.vectors];
  struct Storage {
    tile::Barrier full[kConfig.source == Source::kRing ? kMaxStages : 1];
  };

  __device__ __forceinline__ RowReader(const RowTensor* tensors, const RowShape& shape, const Place<kConfig>& place,
                                       Storage& storage, unsigned char* ring)
      : tensors_(tensors), shape_(shape), place_(place), storage_(storage), ring_(ring) {
    if constexpr (kConfig.source == Source::kRing) {
      if (threadIdx.x == 0) {
        for (int stage = 0; stage < shape.stages; ++stage) storage.full[stage].init(1);
        int64_t row = place.first_row();
        for (int stage = 0; stage < shape.stages && row < shape.rows; ++stage, row += place.row_step()) {
          request(row, stage);
        }
      }
      __syncthreads();
    }
    if constexpr (kConfig.source <= Source::kPrefetch) {
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        next_[tensor] = static_cast<const char*>(tensors[tensor].data) +
                        (kStrided ? 0 : (place.first_row() + place.group) * tensors[tensor].row_stride_bytes) +
                        (place.first_byte() >> is_narrow(tensor));
      }
    }
    if constexpr (kConfig.source == Source::kPrefetch) load(place.first_row() + place.group, ahead_);
    if constexpr (kConfig.source == Source::kAsync) {
#pragma unroll
      for (int stage = 0; stage < kAsyncStages; ++stage) {
        request_own(place.first_row() + stage * place.row_step(), stage);
      }
    }
  }

  __device__ __forceinline__ void take(int64_t row, Row& values) {
    if constexpr (kConfig.source == Source::kDirect) {
      load(row, values);
    } else if constexpr (kConfig.source == Source::kPrefetch) {
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) values[tensor][i] = ahead_[tensor][i];
      }
      load(row + place_.row_step(), ahead_);
    } else {
      if constexpr (kConfig.source == Source::kRing) storage_.full[state_.stage].wait(state_.parity);
      if constexpr (kConfig.source == Source::kAsync) ptx::cp_async_wait_group<kAsyncStages - 1>();
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        const uint32_t slot = ptx::shared_address(ring_) + slot_offset(state_.stage, tensor);
        const bool narrow = is_narrow(tensor);
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) {
          values[tensor][i] = Vector::zero();
          if (!place_.owns(i)) continue;
          if (narrow) {
            const ptx::Word2 pair = ptx::ld_shared_v2(slot + place_.vector(i) * (tile::kVectorBytes / 2));
            values[tensor][i] = {{pair.x, pair.y, 0, 0}};
          } else {
            values[tensor][i] = tile::load_from_shared<T>(slot + place_.vector(i) * tile::kVectorBytes);
          }
        }
      }
    }
    if constexpr (kMixes) {
      if (is_narrow(kMixedTensor)) {
#pragma unroll
        for (Vector& vector : values[kMixedTensor]) vector = {widened(vector.words, tensors_[kMixedTensor].type)};
      }
    }
  }

  __device__ __forceinline__ void stage_is_free(int64_t row) {
    if constexpr (kConfig.source == Source::kRing) {
      const int64_t next = row + shape_.stages * place_.row_step();
      if (threadIdx.x == 0 && next < shape_.rows) request(next, state_.stage);
      state_.advance(shape_.stages);
    }
    if constexpr (kConfig.source == Source::kAsync) {
      request_own(row + kAsyncStages * place_.row_step(), state_.stage);
      state_.advance(kAsyncStages);
    }
  }

 private:
  static constexpr bool kMixes = sizeof(T) == 4 && kMixedTensor >= 0 && kMixedTensor < kTensors;

  __device__ __forceinline__ bool is_narrow(int tensor) const {
    return kMixes && tensor == kMixedTensor && tensors_[tensor].type != MixedType::kSame;
  }
  // Bytes from the tensor's first row to this one.
  __device__ __forceinline__ int64_t row_offset(int tensor, int64_t row) const {
    const RowTensor& of = tensors_[tensor];
    if constexpr (!kStrided) return row * of.row_stride_bytes;
    const uint32_t at = static_cast<uint32_t>(row);
    const uint32_t middle = divide(at, shape_.inner), outer = divide(middle, shape_.middle);
    return (at - middle * shape_.inner.divisor) * of.row_stride_bytes +
           (middle - outer * shape_.middle.divisor) * of.middle_stride_bytes + outer * of.outer_stride_bytes;
  }
  __device__ __forceinline__ const char* slice(int tensor, int64_t row) const {
    return static_cast<const char*>(tensors_[tensor].data) + row_offset(tensor, row) +
           (static_cast<int64_t>(place_.first_vector) * tile::kVectorBytes >> is_narrow(tensor));
  }
  __device__ __forceinline__ uint32_t slot_offset(int stage, int tensor) const {
    return static_cast<uint32_t>(stage * kTensors + tensor) * shape_.slice_vectors * tile::kVectorBytes;
  }
  // The rows of a thread in order: with one stride its addresses move on by themselves.
  __device__ __forceinline__ void load(int64_t row, Row& values) {
    const int reach = row < shape_.rows ? place_.reach : 0;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const char* start = kStrided ? next_[tensor] + row_offset(tensor, row) : next_[tensor];
      if (is_narrow(tensor)) {
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) {
          const ptx::Word2 pair = ptx::ld_global_nc_l1_no_allocate_v2_if(i * kConfig.row_threads < reach,
                                                                         start + i * (Place<kConfig>::kVectorStep / 2));
          values[tensor][i] = {{pair.x, pair.y, 0, 0}};
        }
      } else {
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) {
          values[tensor][i] =
              tile::load_once_if<T>(i * kConfig.row_threads < reach, start + i * Place<kConfig>::kVectorStep);
        }
      }
      if constexpr (!kStrided) next_[tensor] += place_.row_step() * tensors_[tensor].row_stride_bytes;
    }
  }
  __device__ __forceinline__ void request(int64_t row, int stage) const {
    const uint32_t bytes = place_.vector_count * tile::kVectorBytes;
    tile::Barrier& full = storage_.full[stage];
    const uint32_t mixed_bytes = kMixes && is_narrow(kMixedTensor) ? bytes / 2 : bytes;
    full.arrive_expect_bytes(kMixes ? (kTensors - 1) * bytes + mixed_bytes : kTensors * bytes);
    if (bytes == 0) return;
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      tile::copy_to_shared(ptx::shared_address(ring_) + slot_offset(stage, tensor), slice(tensor, row),
                           tensor == kMixedTensor ? mixed_bytes : bytes, full);
    }
  }

  // This thread's vectors of a row. A group is committed even where there is no row, so that waiting counts right.
  __device__ __forceinline__ void request_own(int64_t row, int stage) const {
    if (row < shape_.rows) {
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        const char* start = slice(tensor, row);
        const uint32_t slot = ptx::shared_address(ring_) + slot_offset(stage, tensor);
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) {
          const int offset = place_.vector(i) * tile::kVectorBytes;
          if (place_.owns(i)) ptx::cp_async_cg_shared_global_16(slot + offset, start + offset);
        }
      }
    }
    ptx::cp_async_commit_group();
  }

  const RowTensor* tensors_;
  const RowShape& shape_;
  const Place<kConfig>& place_;
  Storage& storage_;
  unsigned char* ring_;
  tile::PipelineState state_;
  const char* next_[kTensors];  // this thread's first vector of the next row; kStrided: of the first row
  Row ahead_;
};

// A weight or bias as a thread reads it: its own vectors, at steps of kVectorStep of the row's vectors. Absent: zeros.
struct GlobalParameters {
  const char* first;  // null: absent
  template <class T>
  __device__ __forceinline__ tile::Vector<T> load(bool wanted, int byte) const {
    return tile::load_shared_by_all_if<T>(wanted && first != nullptr, first + byte);
  }
};
struct SharedParameters {
  uint32_t first;
  template <class T>
  __device__ __forceinline__ tile::Vector<T> load(bool, int byte) const {
    return tile::load_from_shared<T>(first + byte);
  }
};

// The values of the vector that lies `vectors` of the row after the thread's first, of x's type or float.
template <class T, bool kIsFloat, class Parameters>
__device__ __forceinline__ void load_parameters(const Parameters& parameters, bool wanted, int vectors,
                                                float (&values)[tile::Vector<T>::kCount]) {
  constexpr int kCount = tile::Vector<T>::kCount;
  if constexpr (kIsFloat) {
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) {
      parameters.template load<float>(wanted, (vectors * (kCount / 4) + part) * tile::kVectorBytes)
          .unpack(four_of(values, part));
    }
  } else {
    parameters.template load<T>(wanted, vectors * tile::kVectorBytes).unpack(values);
  }
}

// Where a thread's part of a parameter begins: as many bytes into it as its first vector has values before it.
template <class T, RowConfig kConfig>
__device__ __forceinline__ GlobalParameters own_parameters(const void* data, bool is_float,
                                                           const Place<kConfig>& place) {
  if (data == nullptr) return {nullptr};
  const int vector_bytes = is_float ? tile::Vector<T>::kCount * 4 : tile::kVectorBytes;
  return {static_cast<const char*>(data) + static_cast<int64_t>(place.first_vector + place.lane) * vector_bytes};
}

}  // namespace kernel_pytorch::row_norm
