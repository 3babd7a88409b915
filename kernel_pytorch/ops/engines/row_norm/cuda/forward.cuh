// Row norms forward, one pass over memory:  global -> (ring in shared memory ->) registers -> sums -> global.
// The row stays packed in registers between the statistics and the output, so every byte moves once. Layer norm's
// variance is merged from parts around their own means (tile/moments.cuh). Persistent
// blocks keep the weight in registers.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/engines/row_norm/cuda/rows.cuh"

namespace kernel_pytorch::row_norm {

// Blocks per multiprocessor that the assembler must leave registers for. For sm_100 it needs more of them than for
// sm_90 to hold a layer norm's scale and shift, and would spill.
template <bool kCentered, RowConfig kConfig>
#if __CUDA_ARCH__ >= 1000
inline constexpr int kForwardBlocks = kCentered&& kConfig.blocks > 1 ? kConfig.blocks * 2 / 3 : kConfig.blocks;
#else
inline constexpr int kForwardBlocks = kConfig.blocks;
#endif

// The row between its passes. Unpacking once saves a fifth of all instructions; where a multiprocessor must hold many
// threads or a thread many values, the row stays packed for want of registers.
template <class T, RowConfig kConfig>
class RowValues {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr bool kUnpacked = sizeof(T) < 4 && kConfig.vectors <= 2 && kConfig.threads * kConfig.blocks < 1024;

  __device__ __forceinline__ void set(int i, const tile::Vector<T>& vector) {
    if constexpr (kUnpacked) {
      vector.unpack(unpacked_[i]);
    } else {
      packed_[i] = vector;
    }
  }
  // Unpacked values are replaced by their differences from a pivot; packed ones stay what they are.
  __device__ __forceinline__ void set_differences(int i, const float (&differences)[kCount]) {
    if constexpr (kUnpacked) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) unpacked_[i][k] = differences[k];
    }
  }
  __device__ __forceinline__ void get(int i, float (&values)[kCount]) const {
    if constexpr (kUnpacked) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) values[k] = unpacked_[i][k];
    } else {
      packed_[i].unpack(values);
    }
  }

 private:
  float unpacked_[kUnpacked ? kConfig.vectors : 1][kCount];
  tile::Vector<T> packed_[kUnpacked ? 1 : kConfig.vectors];
};

template <class T, bool kResidual, RowConfig kConfig, bool kStrided>
struct ForwardRow {
  static constexpr int kTensors = kResidual ? 2 : 1;
  static constexpr int kCount = tile::Vector<T>::kCount;
  using Reader = RowReader<T, kTensors, kConfig, kResidual ? 1 : -1, kStrided>;
  using Values = RowValues<T, kConfig>;

  // x + residual, rounded to T, replaces x in the registers and goes out as the sum.
  static __device__ __forceinline__ void add_residual(typename Reader::Row& row, int reach, char* sum) {
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float x[kCount], residual[kCount];
      row[0][i].unpack(x);
      row[kTensors - 1][i].unpack(residual);
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] += residual[k];
      row[0][i] = tile::Vector<T>::pack(x);
      tile::store_if(i * kConfig.row_threads < reach, sum + i * Place<kConfig>::kVectorStep, row[0][i]);
    }
  }

  static __device__ __forceinline__ float sum_squares(const Values& values) {
    float totals[kChains] = {};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float x[kCount];
      values.get(i, x);
#pragma unroll
      for (int k = 0; k < kCount; ++k) totals[k % kChains] += x[k] * x[k];
    }
    return add(totals);
  }

  // The median of this thread's first three values: a value of the row, and seldom far from its mean.
  static __device__ __forceinline__ float pivot_of(const Values& values) {
    float x[kCount];
    values.get(0, x);
    return fmaxf(fminf(x[0], x[1]), fminf(fmaxf(x[0], x[1]), x[2]));
  }

  // Values become differences from the pivot, where they wait unpacked. Vectors beyond the row hold zeros and add none.
  static __device__ __forceinline__ tile::PivotSums sums_around(Values& values, const Place<kConfig>& place,
                                                                float pivot) {
    float totals[2] = {}, squares[2] = {};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      const float center = place.owns(i) ? pivot : 0.0f;
      float x[kCount];
      values.get(i, x);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        x[k] -= center;
        totals[k % 2] += x[k];
        squares[k % 2] += x[k] * x[k];
      }
      values.set_differences(i, x);
    }
    return {totals[0] + totals[1], squares[0] + squares[1]};
  }

 private:
  static constexpr int kChains = 4;  // sums that do not wait for each other
  static __device__ __forceinline__ float add(const float (&totals)[kChains]) {
    return (totals[0] + totals[1]) + (totals[2] + totals[3]);
  }
};

// Scale and shift of the columns a thread owns, held in registers, in shared memory, or read again for each row. In
// shared memory all vectors of all threads fit, so no thread checks whether it has one.
template <class T, bool kIsFloat, bool kCentered, RowConfig kConfig>
class ForwardParameters {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr bool kHeld = kConfig.weight == Weight::kRegisters;
  static constexpr bool kShared = kConfig.weight == Weight::kShared;
  static constexpr bool kUnpacked = kConfig.weight == Weight::kSharedFloat;

  // `shared`: that memory, if they are kept there.
  __device__ __forceinline__ ForwardParameters(const ForwardArguments& arguments, const Place<kConfig>& place,
                                               uint32_t shared)
      : place_(place),
        offset_(arguments.weight != nullptr ? arguments.weight_offset : 1.0f),
        weight_(own_parameters<T>(arguments.weight, kIsFloat, place)),
        bias_(own_parameters<T>(arguments.bias, kIsFloat, place)),
        shared_(shared + place.lane * (kShared ? kParts : 1) * tile::kVectorBytes) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) read_from(weight_, bias_, i, scale_[i], shift_[kCentered ? i : 0]);
    }
    if constexpr (kShared || kUnpacked) {
      if (place.group == 0) fill_shared();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void apply(int i, float (&normal)[kCount]) const {
    float scale[kCount], shift[kCount];
    if constexpr (!kHeld) read(i, scale, shift);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float factor = kHeld ? scale_[i][k] : scale[k];
      const float addend = kCentered ? (kHeld ? shift_[i][k] : shift[k]) : 0.0f;
      normal[k] = kCentered ? normal[k] * factor + addend : normal[k] * factor;
    }
  }

 private:
  static constexpr int kParts = kIsFloat ? kCount / 4 : 1;                 // vectors of a parameter for one of the row
  static constexpr int kCapacity = kConfig.row_threads * kConfig.vectors;  // vectors of the row
  static constexpr int kPackedBytes = kCapacity * kParts * tile::kVectorBytes;
  // Unpacked, the parts of a vector lie apart, so that neighbouring threads read neighbouring words.
  static constexpr int kPartBytes = kCapacity * tile::kVectorBytes;
  static constexpr int kUnpackedBytes = kCapacity * kCount * 4;

  __device__ __forceinline__ void read(int i, float (&scale)[kCount], float (&shift)[kCount]) const {
    if constexpr (kUnpacked) {
#pragma unroll
      for (int part = 0; part < kCount / 4; ++part) {
        const uint32_t address = shared_ + part * kPartBytes + i * Place<kConfig>::kVectorStep;
        tile::load_from_shared<float>(address).unpack(four_of(scale, part));
        if constexpr (kCentered) tile::load_from_shared<float>(address + kUnpackedBytes).unpack(four_of(shift, part));
      }
    } else if constexpr (kShared) {
      read_from(SharedParameters{shared_}, SharedParameters{shared_ + kPackedBytes}, i, scale, shift);
    } else {
      read_from(weight_, bias_, i, scale, shift);
    }
  }
  template <class Parameters>
  __device__ __forceinline__ void read_from(const Parameters& weight, const Parameters& bias, int i,
                                            float (&scale)[kCount], float (&shift)[kCount]) const {
    load_parameters<T, kIsFloat>(weight, place_.owns(i), i * kConfig.row_threads, scale);
#pragma unroll
    for (float& value : scale) value += offset_;
    if constexpr (kCentered) load_parameters<T, kIsFloat>(bias, place_.owns(i), i * kConfig.row_threads, shift);
  }

  // Each thread of the first row brings its own vectors, as every row's threads will read them.
  __device__ __forceinline__ void fill_shared() const {
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if constexpr (kUnpacked) {
        float scale[kCount], shift[kCount];
        read_from(weight_, bias_, i, scale, shift);
        fill_unpacked(i, scale, shift);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int offset = (i * kConfig.row_threads * kParts + part) * tile::kVectorBytes;
          ptx::st_shared_v4(shared_ + offset, weight_.template load<T>(place_.owns(i), offset).words);
          if constexpr (!kCentered) continue;
          ptx::st_shared_v4(shared_ + kPackedBytes + offset, bias_.template load<T>(place_.owns(i), offset).words);
        }
      }
    }
  }
  __device__ __forceinline__ void fill_unpacked(int i, float (&scale)[kCount], float (&shift)[kCount]) const {
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) {
      const uint32_t address = shared_ + part * kPartBytes + i * Place<kConfig>::kVectorStep;
      ptx::st_shared_v4(address, tile::Vector<float>::pack(four_of(scale, part)).words);
      if constexpr (!kCentered) continue;
      ptx::st_shared_v4(address + kUnpackedBytes, tile::Vector<float>::pack(four_of(shift, part)).words);
    }
  }

  const Place<kConfig>& place_;
  const float offset_;  // of the weight; 1 where there is none
  const GlobalParameters weight_;
  const GlobalParameters bias_;
  const uint32_t shared_;  // this thread's first vector
  float scale_[kConfig.vectors][kCount];
  float shift_[kCentered ? kConfig.vectors : 1][kCount];
};

// (value - mean) * rstd. A difference from the pivot takes one instruction, a value two: the product of a large mean
// and rstd would leave its rounding error in the output.
template <bool kCentered, bool kIsDifference>
__device__ __forceinline__ float normalise(float value, float mean, float pivot, float rstd) {
  if constexpr (!kCentered) return value * rstd;
  if constexpr (kIsDifference) return value * rstd + (pivot - mean) * rstd;
  return (value - mean) * rstd;
}

// What a row is summed with: squares alone, or mean and squares together.
template <class T, bool kCentered, RowConfig kConfig>
struct StatisticsOf {
  using Type = RowSum<kConfig, 1>;
  static __device__ __forceinline__ Type make(typename Type::Storage& storage, const Place<kConfig>&, const RowShape&,
                                              int) {
    return Type(storage);
  }
};
template <class T, RowConfig kConfig>
struct StatisticsOf<T, true, kConfig> {
  using Type = RowMoments<T, kConfig>;
  static __device__ __forceinline__ Type make(typename Type::Storage& storage, const Place<kConfig>& place,
                                              const RowShape& shape, int row_vectors) {
    return Type(storage, place, shape, row_vectors);
  }
};

// kIsFloat: weight and bias are float, otherwise of T. kActivated: the output is arguments.activation of the norm.
// kStrided: rows of x and the residual lie along three dimensions, each with its stride.
template <class T, bool kIsFloat, bool kCentered, bool kResidual, RowConfig kConfig, bool kActivated = false,
          bool kStrided = false>
__global__ void __launch_bounds__(kConfig.threads, kForwardBlocks<kCentered, kConfig>)
    forward_rows(const __grid_constant__ ForwardArguments arguments) {
  static_assert(is_legal(kConfig));
  using Row = ForwardRow<T, kResidual, kConfig, kStrided>;
  using Reader = typename Row::Reader;
  using Sum = typename StatisticsOf<T, kCentered, kConfig>::Type;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ typename Reader::Storage reader_storage;
  __shared__ typename Sum::Storage sum_storage;

  tile::follow_closely();
  const RowShape& shape = arguments.shape;
  const Place<kConfig> place(shape, shape.columns / Row::kCount);
  Reader reader(arguments.inputs, shape, place, reader_storage, ring);
  Sum statistics = StatisticsOf<T, kCentered, kConfig>::make(sum_storage, place, shape, shape.columns / Row::kCount);
  const uint32_t ring_bytes = shape.stages * Row::kTensors * shape.slice_vectors * tile::kVectorBytes;
  const ForwardParameters<T, kIsFloat, kCentered, kConfig> parameters(arguments, place,
                                                                      ptx::shared_address(ring) + ring_bytes);
  const float per_column = 1.0f / static_cast<float>(shape.columns);

  const int64_t row_bytes = static_cast<int64_t>(shape.columns) * sizeof(T);
  int64_t offset = (place.first_row() + place.group) * row_bytes + place.first_byte();
  for (int64_t first = place.first_row(); first < shape.rows;
       first += place.row_step(), offset += place.row_step() * row_bytes) {
    const int64_t row = first + place.group;
    const bool active = kRowsPerBlock<kConfig> == 1 || row < shape.rows;
    const int reach = active ? place.reach : 0;
    typename Reader::Row taken;
    reader.take(row, taken);
    if constexpr (kResidual) {
      Row::add_residual(taken, reach, static_cast<char*>(arguments.sum) + offset);
    }
    typename Row::Values values;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) values.set(i, taken[0][i]);
    float mean = 0, pivot = 0, squares;
    if constexpr (kCentered) {
      const tile::Moments moments = statistics.of(
          per_column, [&] { return Row::pivot_of(values); },
          [&](float center) {
            pivot = center;
            return Row::sums_around(values, place, center);
          });
      mean = moments.mean;
      squares = moments.squares;
    } else {
      float totals[1] = {Row::sum_squares(values)};
      statistics.sum(totals);
      squares = totals[0];
    }
    reader.stage_is_free(row);
    const float rstd = rsqrtf(squares * per_column + arguments.eps);

    const bool narrow = sizeof(T) == 4 && arguments.output_type != MixedType::kSame;
    char* output = static_cast<char*>(arguments.output) + (offset >> narrow);
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float normal[Row::kCount];
      values.get(i, normal);
#pragma unroll
      for (float& value : normal) value = normalise<kCentered, Row::Values::kUnpacked>(value, mean, pivot, rstd);
      parameters.apply(i, normal);
      if constexpr (kActivated) pointwise::apply<pointwise::kIsAccurate<T>>(arguments.activation, normal);
      const bool owned = i * kConfig.row_threads < reach;
      if constexpr (sizeof(T) == 4) {
        ptx::st_global_v2_if(owned && narrow, output + i * (Place<kConfig>::kVectorStep / 2),
                             narrowed(normal, arguments.output_type));
      }
      tile::store_if(owned && !narrow, output + i * Place<kConfig>::kVectorStep, tile::Vector<T>::pack(normal));
    }
    if (active && place.leads_row()) {
      if (arguments.mean != nullptr) arguments.mean[row] = mean;
      if (arguments.rstd != nullptr) arguments.rstd[row] = rstd;
    }
  }
}

}  // namespace kernel_pytorch::row_norm
