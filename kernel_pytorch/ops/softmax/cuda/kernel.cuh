// Softmax of rows, one pass over memory: global -> registers -> largest score and sum -> global. A row lies over lanes
// of a warp, a block, or the blocks of a cluster, and stays in registers between its passes, so every byte moves once.
// Exponentials are taken once, around the largest score of a warp, and scaled when the row's is known.
#pragma once

#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/any_rows.cuh"

namespace kernel_pytorch::softmax {

template <RowConfig kConfig>
inline constexpr int kRowsPerBlock = kConfig.threads / kConfig.row_threads;

// The part of a row that this thread owns: vectors lane, lane + row_threads, ... of its block's slice.
template <RowConfig kConfig>
struct Place {
  int group = kRowsPerBlock<kConfig> == 1 ? 0 : threadIdx.x / kConfig.row_threads;
  int lane = threadIdx.x % kConfig.row_threads;
  int first_vector = 0;
  int vector_count;
  int64_t unit = blockIdx.x;
  int64_t units = gridDim.x;

  __device__ __forceinline__ Place(const RowShape& shape, int row_vectors) : vector_count(row_vectors) {
    if constexpr (kConfig.clustered) {
      first_vector = min(static_cast<int>(ptx::cluster_ctarank()) * shape.slice_vectors, row_vectors);
      vector_count = min(shape.slice_vectors, row_vectors - first_vector);
      unit = ptx::clusterid_x();
      units = ptx::nclusterid_x();
    }
  }
  __device__ __forceinline__ int vector(int i) const { return lane + i * kConfig.row_threads; }  // of the slice
  __device__ __forceinline__ bool owns(int i) const { return vector(i) < vector_count; }
};

// Merges over all threads of a row.
template <RowConfig kConfig>
struct RowMaxSum {
  struct Storage {};
  __device__ __forceinline__ explicit RowMaxSum(Storage&) {}
  __device__ __forceinline__ tile::MaxSum merge(tile::MaxSum group) { return group; }
};
template <RowConfig kConfig>
requires(kConfig.row_threads > tile::kWarpLanes && !kConfig.clustered) struct RowMaxSum<kConfig>
    : tile::BlockMaxSum<kConfig.threads / tile::kWarpLanes> {
  using tile::BlockMaxSum<kConfig.threads / tile::kWarpLanes>::BlockMaxSum;
};
template <RowConfig kConfig>
requires(kConfig.clustered) struct RowMaxSum<kConfig> : tile::ClusterMaxSum<kConfig.threads / tile::kWarpLanes> {
  using tile::ClusterMaxSum<kConfig.threads / tile::kWarpLanes>::ClusterMaxSum;
};

template <RowConfig kConfig>
struct RowSum {
  struct Storage {};
  __device__ __forceinline__ explicit RowSum(Storage&) {}
  __device__ __forceinline__ void sum(float (&values)[1]) {
    values[0] = tile::sum_lanes<kConfig.row_threads>(values[0]);
  }
};
template <RowConfig kConfig>
requires(kConfig.row_threads > tile::kWarpLanes && !kConfig.clustered) struct RowSum<kConfig>
    : tile::BlockSum<kConfig.threads / tile::kWarpLanes, 1> {
  using tile::BlockSum<kConfig.threads / tile::kWarpLanes, 1>::BlockSum;
};
template <RowConfig kConfig>
requires(kConfig.clustered) struct RowSum<kConfig> : tile::ClusterSum<kConfig.threads / tile::kWarpLanes, 1> {
  using tile::ClusterSum<kConfig.threads / tile::kWarpLanes, 1>::ClusterSum;
};

// Adds the mask's part of one vector of scores, or removes scores.
template <class T>
__device__ __forceinline__ void apply_mask(const char* mask_row, MaskKind kind, int64_t column,
                                           float (&scores)[tile::Vector<T>::kCount]) {
  constexpr int kCount = tile::Vector<T>::kCount;
  if (kind == MaskKind::kBool) {
    uint32_t words[kCount / 4];
    if constexpr (kCount == 8) {
      const uint2 pair = *reinterpret_cast<const uint2*>(mask_row + column);
      words[0] = pair.x;
      words[kCount / 4 - 1] = pair.y;
    } else {
      words[0] = *reinterpret_cast<const uint32_t*>(mask_row + column);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((words[k / 4] >> (k % 4 * 8) & 0xffu) == 0) scores[k] = tile::minus_infinity();
    }
  } else if (kind == MaskKind::kSameType) {
    float added[kCount];
    tile::load_shared_by_all<T>(mask_row + column * sizeof(T)).unpack(added);
#pragma unroll
    for (int k = 0; k < kCount; ++k) scores[k] += added[k];
  } else {
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) {
      float added[4];
      tile::load_shared_by_all<float>(mask_row + (column + part * 4) * sizeof(float)).unpack(added);
#pragma unroll
      for (int k = 0; k < 4; ++k) scores[part * 4 + k] += added[k];
    }
  }
}

__device__ __forceinline__ int mask_element_bytes(MaskKind kind, int element_bytes) {
  return kind == MaskKind::kBool ? 1 : kind == MaskKind::kFloat ? 4 : element_bytes;
}

// A row in registers, unpacked: its scores, and for softmax later their exponentials in the same place. Columns past
// the row's end, or that no one may see, are -inf.
template <class T, bool kMasked, RowConfig kConfig>
class Scores {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr int kLanes = kConfig.row_threads < tile::kWarpLanes ? kConfig.row_threads : tile::kWarpLanes;

  __device__ __forceinline__ Scores(const ForwardArguments& arguments, const Place<kConfig>& place, int64_t row) {
    const bool is_row = kRowsPerBlock<kConfig> == 1 || row < arguments.shape.rows;
    const int64_t visible = !is_row            ? 0
                            : arguments.causal ? causal_columns(row, arguments.queries, arguments.shape.columns)
                                               : arguments.shape.columns;
    // Visible columns of the slice, from the thread's first vector on.
    const int reach =
        min(static_cast<int>(visible) - place.first_vector * kCount, place.vector_count * kCount) - place.lane * kCount;
    const char* start = static_cast<const char*>(arguments.x.data) + row * arguments.x.row_stride_bytes +
                        static_cast<int64_t>(place.first_vector + place.lane) * tile::kVectorBytes;
    tile::Vector<T> loaded[kConfig.vectors];
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      loaded[i] = {ptx::ld_global_v4_if(i * kColumnStep < reach, start + i * kConfig.row_threads * tile::kVectorBytes)};
    }
    const char* mask_row = kMasked ? static_cast<const char*>(arguments.mask.data) +
                                         any_row_offset(arguments.mask, arguments.mask_shape, row) *
                                             mask_element_bytes(arguments.mask_kind, sizeof(T))
                                   : nullptr;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      loaded[i].unpack(values_[i]);
#pragma unroll
      for (float& value : values_[i]) value *= arguments.scale;
      const int left = reach - i * kColumnStep;
      if (kMasked && left > 0) {
        apply_mask<T>(mask_row, arguments.mask_kind, (place.first_vector + place.vector(i)) * kCount, values_[i]);
      }
      if (left >= kCount) continue;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (k >= left) values_[i][k] = tile::minus_infinity();
      }
    }
  }

  // Reduces over the lanes of a warp that share the row; replaces the scores by exponentials if `exponentiates`.
  __device__ __forceinline__ tile::MaxSum reduce(bool exponentiates) {
    float most[2] = {tile::minus_infinity(), tile::minus_infinity()};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) most[k % 2] = fmaxf(most[k % 2], values_[i][k]);
    }
    const float largest = tile::max_lanes<kLanes>(fmaxf(most[0], most[1]));
    const float center = tile::exponent_center(largest);
    float sums[4] = {};
    if (exponentiates) {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          values_[i][k] = tile::exponential<T>(values_[i][k], center);
          sums[k % 4] += values_[i][k];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[k % 4] += tile::exponential<T>(values_[i][k], center);
      }
    }
    return {largest, tile::sum_lanes<kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]))};
  }

  // Writes values * factor.
  __device__ __forceinline__ void store(const Place<kConfig>& place, char* slice, float factor) const {
    char* start = slice + place.lane * tile::kVectorBytes;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float results[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) results[k] = values_[i][k] * factor;
      tile::store_if(place.owns(i), start + i * kConfig.row_threads * tile::kVectorBytes,
                     tile::Vector<T>::pack(results));
    }
  }
  // Writes (values - base) - log_sum.
  __device__ __forceinline__ void store_logarithms(const Place<kConfig>& place, char* slice, float base,
                                                   float log_sum) const {
    char* start = slice + place.lane * tile::kVectorBytes;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float results[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) results[k] = (values_[i][k] - base) - log_sum;
      tile::store_if(place.owns(i), start + i * kConfig.row_threads * tile::kVectorBytes,
                     tile::Vector<T>::pack(results));
    }
  }

 private:
  static constexpr int kColumnStep = kConfig.row_threads * kCount;  // between vectors of a thread
  float values_[kConfig.vectors][kCount];
};

template <class T, bool kMasked, RowConfig kConfig>
__global__ void __launch_bounds__(kConfig.threads, kMasked ? (kConfig.blocks + 1) / 2 : kConfig.blocks)
    forward_rows(const __grid_constant__ ForwardArguments arguments) {
  static_assert(is_legal(kConfig));
  constexpr int kCount = tile::Vector<T>::kCount;
  __shared__ typename RowMaxSum<kConfig>::Storage storage;
  RowMaxSum<kConfig> totals(storage);
  const Place<kConfig> place(arguments.shape, arguments.shape.columns / kCount);
  for (int64_t first = place.unit * kRowsPerBlock<kConfig>; first < arguments.shape.rows;
       first += place.units * kRowsPerBlock<kConfig>) {
    const int64_t row = first + place.group;
    Scores<T, kMasked, kConfig> scores(arguments, place, row);
    const tile::MaxSum own = scores.reduce(!arguments.log);
    const tile::MaxSum total = totals.merge(own);
    if (kRowsPerBlock < kConfig >> 1 && row >= arguments.shape.rows) continue;

    const bool is_empty = total.sum == 0 && arguments.empty_is_zero;
    char* slice = static_cast<char*>(arguments.output) +
                  (row * (arguments.shape.columns / kCount) + place.first_vector) * tile::kVectorBytes;
    if (arguments.log) {
      const float base = total.largest == tile::minus_infinity() ? 0.0f : total.largest;
      scores.store_logarithms(place, slice, base, is_empty ? 0.0f : total.log_sum());
    } else {
      // The exponentials stand around this warp's own center. One without a score has only zeros, or NaN.
      const bool has_score = own.largest != tile::minus_infinity();
      const float moved = has_score ? ptx::ex2_approx_ftz_f32(own.center() - total.center()) : 1.0f;
      scores.store(place, slice, is_empty ? 0.0f : moved / total.sum);
    }
  }
}

template <class T, RowConfig kConfig>
__global__ void __launch_bounds__(kConfig.threads, kConfig.blocks)
    backward_rows(const __grid_constant__ BackwardArguments arguments) {
  static_assert(is_legal(kConfig));
  constexpr int kCount = tile::Vector<T>::kCount;
  __shared__ typename RowSum<kConfig>::Storage storage;
  RowSum<kConfig> totals(storage);
  const Place<kConfig> place(arguments.shape, arguments.shape.columns / kCount);
  const uint64_t policy = tile::make_policy(tile::Keep::kNormal);
  for (int64_t first = place.unit * kRowsPerBlock<kConfig>; first < arguments.shape.rows;
       first += place.units * kRowsPerBlock<kConfig>) {
    const int64_t row = first + place.group;
    const bool is_row = kRowsPerBlock<kConfig> == 1 || row < arguments.shape.rows;
    const int64_t slice = static_cast<int64_t>(place.first_vector) * tile::kVectorBytes;
    const char* gradient_start =
        static_cast<const char*>(arguments.grad_output.data) + row * arguments.grad_output.row_stride_bytes + slice;
    const char* output_start =
        static_cast<const char*>(arguments.output.data) + row * arguments.output.row_stride_bytes + slice;
    tile::Vector<T> gradients[kConfig.vectors], outputs[kConfig.vectors];
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      gradients[i] = outputs[i] = tile::Vector<T>::zero();
      if (!is_row || !place.owns(i)) continue;
      const int offset = place.vector(i) * tile::kVectorBytes;
      gradients[i] = {ptx::ld_global_l1_no_allocate_l2_cache_hint_v4(gradient_start + offset, policy)};
      outputs[i] = {ptx::ld_global_l1_no_allocate_l2_cache_hint_v4(output_start + offset, policy)};
    }
    float chains[4] = {};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float gradient[kCount], output[kCount];
      gradients[i].unpack(gradient);
      outputs[i].unpack(output);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        chains[k % 4] = fmaf(gradient[k], arguments.log ? 1.0f : output[k], chains[k % 4]);
      }
    }
    float total[1] = {(chains[0] + chains[1]) + (chains[2] + chains[3])};
    totals.sum(total);
    if (!is_row) continue;
    char* grad_input = static_cast<char*>(arguments.grad_input) +
                       (row * (arguments.shape.columns / kCount) + place.first_vector) * tile::kVectorBytes;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (!place.owns(i)) continue;
      float gradient[kCount], output[kCount];
      gradients[i].unpack(gradient);
      outputs[i].unpack(output);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (arguments.log) {
          const bool is_removed = arguments.masked && output[k] == tile::minus_infinity();
          gradient[k] =
              is_removed ? 0.0f : (gradient[k] - tile::exponential<T>(output[k], 0.0f) * total[0]) * arguments.scale;
        } else {
          gradient[k] = output[k] * (gradient[k] - total[0]) * arguments.scale;
        }
      }
      tile::store(grad_input + place.vector(i) * tile::kVectorBytes, tile::Vector<T>::pack(gradient), policy);
    }
  }
}

}  // namespace kernel_pytorch::softmax
