// Row norms backward, one pass over memory:  grad_output, value (, grad_sum) -> registers -> sums -> grad_input.
// A thread owns the same columns of every row its block takes, so the weight's gradient is a plain sum in registers;
// each block writes one partial row and reduce_partials adds them up. No atomics: the result repeats bit for bit.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/engines/row_norm/cuda/rows.cuh"

namespace kernel_pytorch::row_norm {

// Statistics of a row, asked for one round before they are needed.
struct RowStatistics {
  float mean = 0;
  float rstd = 0;
  template <bool kCentered>
  static __device__ __forceinline__ RowStatistics load(const BackwardArguments& arguments, int64_t row) {
    RowStatistics statistics;
    if (row >= arguments.shape.rows) return statistics;
    if constexpr (kCentered) statistics.mean = arguments.mean[row];
    statistics.rstd = arguments.rstd[row];
    return statistics;
  }
};

template <class T, bool kCentered, RowConfig kConfig>
class Gradients {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr int kValues = kCentered ? 2 : 1;

  __device__ __forceinline__ Gradients(const BackwardArguments& arguments, const Place<kConfig>& place)
      : arguments_(arguments),
        place_(place),
        weight_(own_parameters<T>(arguments.weight, arguments.weight_is_float, place)),
        offset_(arguments.weight != nullptr ? arguments.weight_offset : 1.0f) {
    if constexpr (kConfig.weight == Weight::kRegisters) {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) read_scale(i, scale_[i]);
    }
  }

  // Adds the row to the column sums and returns this thread's part of sum(g * normal) and, centred, of sum(g). Vectors
  // beyond the row have zero gradients, and so add nothing.
  __device__ __forceinline__ void accumulate(const tile::Vector<T> (&grad_output)[kConfig.vectors],
                                             const tile::Vector<T> (&value)[kConfig.vectors],
                                             const RowStatistics& statistics, float (&totals)[kValues]) {
#pragma unroll
    for (float& total : totals) total = 0;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (!place_.owns(i)) continue;
      float gradient[kCount], normal[kCount], scale[kCount];
      unpack(i, grad_output[i], value[i], statistics, gradient, normal, scale);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        along_[i][k] += gradient[k] * normal[k];
        if constexpr (kCentered) level_[i][k] += gradient[k];
        gradient[k] *= scale[k];
        totals[0] += gradient[k] * normal[k];
        if constexpr (kCentered) totals[kValues - 1] += gradient[k];
      }
    }
  }

  // grad_input of vector i without grad_sum.
  __device__ __forceinline__ void input_gradient(int i, const tile::Vector<T>& grad_output,
                                                 const tile::Vector<T>& value, const RowStatistics& statistics,
                                                 float along, float level, float (&result)[kCount]) const {
    float normal[kCount], scale[kCount];
    unpack(i, grad_output, value, statistics, result, normal, scale);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float gradient = result[k] * scale[k] - (kCentered ? level : 0.0f);
      result[k] = statistics.rstd * (gradient - normal[k] * along);
    }
  }

  // Rows of the block's partial: those of the groups of threads are added in the order of the groups.
  __device__ __forceinline__ void store_partials(unsigned char* shared) {
    store(along_, arguments_.weight_partial, reinterpret_cast<float*>(shared));
    if constexpr (kCentered) store(level_, arguments_.bias_partial, reinterpret_cast<float*>(shared));
  }

 private:
  __device__ __forceinline__ void read_scale(int i, float (&scale)[kCount]) const {
    if (arguments_.weight_is_float) {
      load_parameters<T, true>(weight_, place_.owns(i), i * kConfig.row_threads, scale);
    } else {
      load_parameters<T, false>(weight_, place_.owns(i), i * kConfig.row_threads, scale);
    }
#pragma unroll
    for (float& value : scale) value += offset_;
  }
  __device__ __forceinline__ void unpack(int i, const tile::Vector<T>& grad_output, const tile::Vector<T>& value,
                                         const RowStatistics& statistics, float (&gradient)[kCount],
                                         float (&normal)[kCount], float (&scale)[kCount]) const {
    grad_output.unpack(gradient);
    value.unpack(normal);
#pragma unroll
    for (float& entry : normal) entry = (kCentered ? entry - statistics.mean : entry) * statistics.rstd;
    if constexpr (kConfig.weight == Weight::kRegisters) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) scale[k] = scale_[i][k];
    } else {
      read_scale(i, scale);
    }
  }

  template <int kRows>
  __device__ __forceinline__ void store(const float (&sums)[kRows][kCount], float* partial, float* shared) {
    if (partial == nullptr) return;
    const int first_column = place_.first_vector * kCount;
    float* target = partial + place_.unit * arguments_.shape.columns + first_column;
    if constexpr (kRowsPerBlock<kConfig> == 1) {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) {
        if (!place_.owns(i)) continue;
#pragma unroll
        for (int k = 0; k < kCount; k += 4) {
          ptx::st_global_v4(target + place_.vector(i) * kCount + k,
                            {__float_as_uint(sums[i][k]), __float_as_uint(sums[i][k + 1]),
                             __float_as_uint(sums[i][k + 2]), __float_as_uint(sums[i][k + 3])});
        }
      }
    } else {
      __syncthreads();
      for (int column = threadIdx.x; column < arguments_.shape.columns; column += kConfig.threads) shared[column] = 0;
      for (int group = 0; group < kRowsPerBlock<kConfig>; ++group) {
        __syncthreads();
        if (group != place_.group) continue;
#pragma unroll
        for (int i = 0; i < kConfig.vectors; ++i) {
          if (!place_.owns(i)) continue;
#pragma unroll
          for (int k = 0; k < kCount; ++k) shared[place_.vector(i) * kCount + k] += sums[i][k];
        }
      }
      __syncthreads();
      for (int column = threadIdx.x; column < arguments_.shape.columns; column += kConfig.threads) {
        target[column] = shared[column];
      }
    }
  }

  const BackwardArguments& arguments_;
  const Place<kConfig>& place_;
  const GlobalParameters weight_;
  const float offset_;  // of the weight; 1 where there is none
  float scale_[kConfig.vectors][kCount];
  float along_[kConfig.vectors][kCount] = {};                  // of grad_output * normal: the weight's gradient
  float level_[kCentered ? kConfig.vectors : 1][kCount] = {};  // of grad_output: the bias'
};

template <class T, bool kCentered, bool kGradSum, RowConfig kConfig, bool kStrided = false>
__global__ void __launch_bounds__(kConfig.threads, kConfig.blocks)
    backward_rows(const __grid_constant__ BackwardArguments arguments) {
  static_assert(is_legal(kConfig));
  using Reader = RowReader<T, kGradSum ? 3 : 2, kConfig, 0, kStrided>;
  using RowGradients = Gradients<T, kCentered, kConfig>;
  using Sum = RowSum<kConfig, RowGradients::kValues>;
  constexpr int kCount = RowGradients::kCount;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ typename Reader::Storage reader_storage;
  __shared__ typename Sum::Storage sum_storage;

  const RowShape& shape = arguments.shape;
  const Place<kConfig> place(shape, shape.columns / kCount);
  Reader reader(arguments.inputs, shape, place, reader_storage, ring);
  RowStatistics next = RowStatistics::load<kCentered>(arguments, place.first_row() + place.group);
  Sum sum(sum_storage);
  RowGradients gradients(arguments, place);
  const float per_column = 1.0f / static_cast<float>(shape.columns);
  tile::let_next_kernel_start();

  const int64_t row_bytes = static_cast<int64_t>(shape.columns) * sizeof(T);
  char* target =
      static_cast<char*>(arguments.grad_input) + (place.first_row() + place.group) * row_bytes + place.first_byte();
  for (int64_t first = place.first_row(); first < shape.rows;
       first += place.row_step(), target += place.row_step() * row_bytes) {
    const int64_t row = first + place.group;
    const RowStatistics statistics = next;
    next = RowStatistics::load<kCentered>(arguments, row + place.row_step());
    typename Reader::Row values;
    reader.take(row, values);
    float totals[RowGradients::kValues];
    gradients.accumulate(values[0], values[1], statistics, totals);
    sum.sum(totals);
    reader.stage_is_free(row);
    if (arguments.grad_input == nullptr || (kRowsPerBlock < kConfig >> 1 && row >= shape.rows)) continue;
    const float along = totals[0] * per_column;
    const float level = kCentered ? totals[RowGradients::kValues - 1] * per_column : 0.0f;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (!place.owns(i)) continue;  // a branch, not a predicate: vectors side by side would spill
      float result[kCount];
      gradients.input_gradient(i, values[0][i], values[1][i], statistics, along, level, result);
      if constexpr (kGradSum) {
        float grad_sum[kCount];
        values[2][i].unpack(grad_sum);
#pragma unroll
        for (int k = 0; k < kCount; ++k) result[k] += grad_sum[k];
      }
      tile::store(target + i * Place<kConfig>::kVectorStep, tile::Vector<T>::pack(result));
    }
  }
  gradients.store_partials(ring);
}

}  // namespace kernel_pytorch::row_norm
