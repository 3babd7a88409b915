// Row norms forward, one pass over memory:  global -> (ring in shared memory ->) registers -> sums -> global.
// The row stays packed in registers between the statistics and the output, so every byte moves once. Layer norm's
// variance is merged from parts around their own means (tile/moments.cuh), not a difference of squares. Persistent
// blocks keep the weight in registers.
#pragma once

#include "kernel_pytorch/ops/row_norm/row_norm_rows_cuda.cuh"

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

template <class T, bool kResidual, RowConfig kConfig>
struct ForwardRow {
  static constexpr int kTensors = kResidual ? 2 : 1;
  static constexpr int kCount = tile::Vector<T>::kCount;
  using Reader = RowReader<T, kTensors, kConfig>;
  using Values = RowValues<T, kConfig>;

  // x + residual, rounded to T, replaces x in the registers and goes out as the sum.
  static __device__ __forceinline__ void add_residual(typename Reader::Row& row, const Place<kConfig>& place, char* sum,
                                                      bool active) {
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float x[kCount], residual[kCount];
      row[0][i].unpack(x);
      row[kTensors - 1][i].unpack(residual);
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] += residual[k];
      row[0][i] = tile::Vector<T>::pack(x);
      if (active && place.owns(i)) tile::store(sum + place.vector(i) * tile::kVectorBytes, row[0][i]);
    }
  }

  static __device__ __forceinline__ float sum_values(const Values& values) {
    float totals[kChains] = {};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      float x[kCount];
      values.get(i, x);
#pragma unroll
      for (int k = 0; k < kCount; ++k) totals[k % kChains] += x[k];
    }
    return add(totals);
  }

  // Vectors beyond the row hold zeros, which only a centre moves away from zero.
  template <bool kCentered>
  static __device__ __forceinline__ float sum_squares(const Values& values, const Place<kConfig>& place, float mean) {
    float totals[kChains] = {};
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (kCentered && !place.owns(i)) continue;
      float x[kCount];
      values.get(i, x);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float value = kCentered ? x[k] - mean : x[k];
        totals[k % kChains] += value * value;
      }
    }
    return add(totals);
  }

 private:
  static constexpr int kChains = 4;  // sums that do not wait for each other
  static __device__ __forceinline__ float add(const float (&totals)[kChains]) {
    return (totals[0] + totals[1]) + (totals[2] + totals[3]);
  }
};

// Scale and shift of the columns a thread owns, held in registers, in shared memory, or read again for each row.
template <class T, bool kCentered, RowConfig kConfig>
class ForwardParameters {
 public:
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr bool kHeld = kConfig.weight == Weight::kRegisters;
  static constexpr bool kShared = kConfig.weight == Weight::kShared;
  static constexpr bool kFloat = kConfig.weight == Weight::kSharedFloat;

  // `shared`: room for the block's part of weight and bias, where they wait in shared memory.
  __device__ __forceinline__ ForwardParameters(const ForwardArguments& arguments, const Place<kConfig>& place,
                                               uint32_t shared)
      : arguments_(arguments), place_(place), shared_weight_(shared) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kConfig.vectors; ++i) {
        if (place.owns(i)) read(i, scale_[i], shift_[kCentered ? i : 0]);
      }
    }
    if constexpr (kFloat) {
      shared_bias_ = shared + arguments.shape.slice_vectors * kCount * 4;
      unpack_into_shared();
      __syncthreads();
    }
    if constexpr (kShared) {
      const int vector_bytes = arguments.weight_is_float ? kCount * 4 : tile::kVectorBytes;
      shared_bias_ = shared + (arguments.weight != nullptr ? arguments.shape.slice_vectors * vector_bytes : 0);
      copy(arguments.weight, shared_weight_, vector_bytes);
      if constexpr (kCentered) copy(arguments.bias, shared_bias_, vector_bytes);
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
  __device__ __forceinline__ void unpack_into_shared() const {
    for (int vector = threadIdx.x; vector < place_.vector_count; vector += kConfig.threads) {
      float scale[kCount], shift[kCount];
      read_from(GlobalParameters{arguments_.weight}, GlobalParameters{arguments_.bias}, place_.first_vector + vector,
                scale, shift);
#pragma unroll
      for (int part = 0; part < kCount / 4; ++part) {
        const int byte = float_offset(vector, part);
        ptx::st_shared_v4(shared_weight_ + byte, tile::Vector<float>::pack(four(scale, part)).words);
        if constexpr (kCentered)
          ptx::st_shared_v4(shared_bias_ + byte, tile::Vector<float>::pack(four(shift, part)).words);
      }
    }
  }
  // Parts of a vector lie apart, so that neighbouring threads read neighbouring words.
  __device__ __forceinline__ int float_offset(int vector, int part) const {
    return (part * arguments_.shape.slice_vectors + vector) * tile::kVectorBytes;
  }
  static __device__ __forceinline__ const float (&four(const float (&values)[kCount], int part))[4] {
    return reinterpret_cast<const float(&)[4]>(values[part * 4]);
  }
  __device__ __forceinline__ void copy(const void* parameters, uint32_t target, int vector_bytes) const {
    if (parameters == nullptr) return;
    const char* source =
        static_cast<const char*>(parameters) + static_cast<int64_t>(place_.first_vector) * vector_bytes;
    for (int byte = threadIdx.x * tile::kVectorBytes; byte < place_.vector_count * vector_bytes;
         byte += kConfig.threads * tile::kVectorBytes) {
      ptx::st_shared_v4(target + byte, ptx::ld_global_nc_v4(source + byte));
    }
  }
  __device__ __forceinline__ void read(int i, float (&scale)[kCount], float (&shift)[kCount]) const {
    if constexpr (kFloat) {
#pragma unroll
      for (int part = 0; part < kCount / 4; ++part) {
        const int byte = float_offset(place_.vector(i), part);
        float(&scale_part)[4] = reinterpret_cast<float(&)[4]>(scale[part * 4]);
        float(&shift_part)[4] = reinterpret_cast<float(&)[4]>(shift[part * 4]);
        tile::load_from_shared<float>(shared_weight_ + byte).unpack(scale_part);
        if constexpr (kCentered) tile::load_from_shared<float>(shared_bias_ + byte).unpack(shift_part);
      }
    } else if constexpr (kShared) {
      read_from(SharedParameters{shared_weight_, arguments_.weight != nullptr},
                SharedParameters{shared_bias_, arguments_.bias != nullptr}, place_.vector(i), scale, shift);
    } else {
      read_from(GlobalParameters{arguments_.weight}, GlobalParameters{arguments_.bias},
                place_.first_vector + place_.vector(i), scale, shift);
    }
  }
  template <class Parameters>
  __device__ __forceinline__ void read_from(const Parameters& weight, const Parameters& bias, int vector,
                                            float (&scale)[kCount], float (&shift)[kCount]) const {
    load_scale<T>(weight, arguments_.weight_is_float, arguments_.weight_offset, vector, scale);
    if constexpr (kCentered) {
#pragma unroll
      for (float& value : shift) value = 0.0f;
      if (bias.is_present()) load_parameters<T>(bias, arguments_.weight_is_float, vector, shift);
    }
  }

  const ForwardArguments& arguments_;
  const Place<kConfig>& place_;
  const uint32_t shared_weight_;
  uint32_t shared_bias_;
  float scale_[kConfig.vectors][kCount];
  float shift_[kCentered ? kConfig.vectors : 1][kCount];
};

// (value - mean) * rstd. A 16-bit value cannot be so far from zero against the row's deviation that the one instruction
// of the second form would show; a 32-bit value can.
template <class T, bool kCentered>
__device__ __forceinline__ float normalise(float value, float mean, float rstd) {
  if constexpr (!kCentered) return value * rstd;
  if constexpr (sizeof(T) == 4) return (value - mean) * rstd;
  return value * rstd - mean * rstd;
}

// What a row is summed with: squares alone, or mean and squares together.
template <bool kCentered, RowConfig kConfig>
struct StatisticsOf {
  using Type = RowSum<kConfig, 1>;
  static __device__ __forceinline__ Type make(typename Type::Storage& storage, const Place<kConfig>&, const RowShape&,
                                              int) {
    return Type(storage);
  }
};
template <RowConfig kConfig>
struct StatisticsOf<true, kConfig> {
  using Type = RowMoments<kConfig>;
  static __device__ __forceinline__ Type make(typename Type::Storage& storage, const Place<kConfig>& place,
                                              const RowShape& shape, int row_vectors) {
    return Type(storage, place, shape, row_vectors);
  }
};

template <class T, bool kCentered, bool kResidual, RowConfig kConfig>
__global__ void __launch_bounds__(kConfig.threads, kForwardBlocks<kCentered, kConfig>)
    forward_rows(const __grid_constant__ ForwardArguments arguments) {
  static_assert(is_legal(kConfig));
  using Row = ForwardRow<T, kResidual, kConfig>;
  using Reader = typename Row::Reader;
  using Sum = typename StatisticsOf<kCentered, kConfig>::Type;
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ typename Reader::Storage reader_storage;
  __shared__ typename Sum::Storage sum_storage;

  const RowShape& shape = arguments.shape;
  const Place<kConfig> place(shape, shape.columns / Row::kCount);
  Reader reader(arguments.inputs, shape, place, reader_storage, ring);
  Sum statistics = StatisticsOf<kCentered, kConfig>::make(sum_storage, place, shape, shape.columns / Row::kCount);
  const uint32_t ring_bytes = shape.stages * Row::kTensors * shape.slice_vectors * tile::kVectorBytes;
  const ForwardParameters<T, kCentered, kConfig> parameters(arguments, place, ptx::shared_address(ring) + ring_bytes);
  const float per_column = 1.0f / static_cast<float>(shape.columns);

  for (int64_t first = place.first_row(); first < shape.rows; first += place.row_step()) {
    const int64_t row = first + place.group;
    const bool active = kRowsPerBlock<kConfig> == 1 || row < shape.rows;
    const int64_t slice_bytes = (row * (shape.columns / Row::kCount) + place.first_vector) * tile::kVectorBytes;
    typename Reader::Row taken;
    reader.take(row, taken);
    if constexpr (kResidual) {
      Row::add_residual(taken, place, static_cast<char*>(arguments.sum) + slice_bytes, active);
    }
    typename Row::Values values;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) values.set(i, taken[0][i]);
    float mean = 0, squares;
    if constexpr (kCentered) {
      const tile::Moments moments = statistics.of(
          per_column, [&] { return Row::sum_values(values); },
          [&](float center) { return Row::template sum_squares<true>(values, place, center); });
      mean = moments.mean;
      squares = moments.squares;
    } else {
      float totals[1] = {Row::template sum_squares<false>(values, place, 0.0f)};
      statistics.sum(totals);
      squares = totals[0];
    }
    reader.stage_is_free(row);
    const float rstd = rsqrtf(squares * per_column + arguments.eps);

    char* output = static_cast<char*>(arguments.output) + slice_bytes;
#pragma unroll
    for (int i = 0; i < kConfig.vectors; ++i) {
      if (!active || !place.owns(i)) continue;
      float normal[Row::kCount];
      values.get(i, normal);
#pragma unroll
      for (float& value : normal) value = normalise<T, kCentered>(value, mean, rstd);
      parameters.apply(i, normal);
      tile::store(output + place.vector(i) * tile::kVectorBytes, tile::Vector<T>::pack(normal));
    }
    if (active && place.leads_row()) {
      if (arguments.mean != nullptr) arguments.mean[row] = mean;
      if (arguments.rstd != nullptr) arguments.rstd[row] = rstd;
    }
  }
}

}  // namespace kernel_pytorch::row_norm
