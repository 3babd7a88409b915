// Quantising by groups and back: one visit to memory. A thread has 16 columns of a row in registers; the up to eight
// threads of a group find its range by shuffles. kAligned: rows begin at multiples of 16 bytes and have a multiple of
// 16 columns, so that all accesses are vectors. sm_80.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/group_quantize/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/group_quantize/cuda/pairs.cuh"

namespace kernel_pytorch::group_quantize {

using namespace group_format;

// Where a thread's columns are. Units of a row are a multiple of those of a group: some lie behind the last column.
struct Unit {
  int64_t row;
  int32_t column, group;  // the first column, the group of its row
  bool leads;             // its group

  __device__ __forceinline__ Unit(int32_t columns_of_group, int32_t groups) {
    const int32_t shift = 31 - __clz(columns_of_group / kUnit), in_row = groups << shift;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    // A division of 64 bits would cost more than rounding 16 values.
    row = gridDim.x <= 0xffffffffu / kThreads ? static_cast<uint32_t>(index) / static_cast<uint32_t>(in_row)
                                              : index / in_row;
    const int32_t unit = static_cast<int32_t>(index - row * in_row);
    column = unit * kUnit;
    group = unit >> shift;
    leads = (unit & ((1 << shift) - 1)) == 0;
  }
};

template <class T, bool kAligned>
__device__ __forceinline__ void load_unit(const T* row, int32_t column, int32_t columns, bool is_inside,
                                          float (&values)[kUnit]) {
  if constexpr (kAligned) {
    constexpr int kCount = tile::Vector<T>::kCount;
#pragma unroll
    for (int i = 0; i < kUnit / kCount; ++i) {
      float part[kCount];
      tile::load_once_if<T>(is_inside && column < columns, row + column + i * kCount).unpack(part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[i * kCount + j] = part[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values[i] = is_inside && column + i < columns ? tile::to_float<T>(row[column + i]) : 0.0f;
    }
  }
}

template <Format kFormat, bool kAligned>
__device__ __forceinline__ void store_codes(uint8_t* row, int32_t column, int32_t columns,
                                            const uint32_t (&codes)[kUnit]) {
  constexpr int kBits = code_bits(kFormat), kBytes = kUnit / 8 * kBits;
  uint32_t words[(kBytes + 3) / 4] = {};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    words[i * kBits / 32] |= codes[i] << (i * kBits % 32);
    if constexpr (is_bit_stream(kFormat)) {  // a code may lie in two words
      if (i * kBits % 32 + kBits > 32) words[i * kBits / 32 + 1] |= codes[i] >> (32 - i * kBits % 32);
    }
  }
  uint8_t* target = row + static_cast<int64_t>(column) / 8 * kBits;
  if constexpr (kAligned) {
    if constexpr (is_bit_stream(kFormat)) {  // rows and units are multiples of two bytes
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) {
        reinterpret_cast<uint16_t*>(target)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      }
    } else if constexpr (has_4_bits(kFormat)) {
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
      ptx::st_global_v4(target, {words[0], words[1], words[2], words[3]});
    }
  } else {
    const int32_t bytes = (min(columns - column, kUnit) * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (i < bytes) target[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

template <class T>
constexpr ScaleType kTypeOf = ScaleType::kFloat32;
template <>
constexpr ScaleType kTypeOf<tile::BFloat16> = ScaleType::kBFloat16;
template <>
constexpr ScaleType kTypeOf<tile::Float16> = ScaleType::kFloat16;

#if __CUDA_ARCH__ >= 900
// The scale's byte, and what codes are multiplied by; the conversion rounds as format_cuda.h does.
template <Format kFormat>
__device__ __forceinline__ uint32_t scale_of_pairs(uint32_t amax, float tensor_scale, float& value) {
  if constexpr (kFormat == Format::kNvfp4) {
    const float exact = from_bits(amax < kInfinityBits ? amax : kNaNBits) / (6.0f * tensor_scale);
    const uint16_t byte = ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, exact);
    value = ptx::cvt_f32_f16(static_cast<uint16_t>(ptx::cvt_rn_f16x2_e4m3x2(byte))) * tensor_scale;
    return byte;
  } else {
    const GroupScale scale = scale_of<kFormat>({amax, 0.0f, 0.0f}, false, ScaleType::kBFloat16, 1.0f);
    value = scale.value;
    return scale_byte<kFormat>(scale.stored);
  }
}

// bf16 to E2M1: the values stay in pairs. A warp has 32 units of one row; codes and scales of rows follow one another,
// so that only rows of x that do not need their place. A lane's unit is 32 bytes, of which a load takes 16:
//   kPaired false  those of every lane's own unit, so a load takes half of each sector and the first cache serves the
//   rest kPaired true   neighbouring ones, and two lanes exchange halves: whole sectors for 14 more instructions
template <Format kFormat, bool kPaired>
__global__ void __launch_bounds__(kThreads, 6) quantize_pairs(const __grid_constant__ QuantizeArguments arguments) {
  constexpr int kHalf = kUnit / 4;  // words
  const uint32_t lane = threadIdx.x % 32, index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (index >= arguments.warps) return;
  const auto* x = static_cast<const tile::BFloat16*>(arguments.x) + static_cast<uint64_t>(index) * (32 * kUnit);
  if (arguments.row_gap != 0) x += divide(index, arguments.warps_of_row) * arguments.row_gap;
  const float tensor_scale = arguments.tensor_scale != nullptr ? *arguments.tensor_scale : 1.0f;
  const ptx::Word4 a = ptx::ld_global_nc_v4(x + lane * (kPaired ? kUnit / 2 : kUnit));
  const ptx::Word4 b = ptx::ld_global_nc_v4(x + (kPaired ? lane + 32 : 2 * lane + 1) * (kUnit / 2));
  uint32_t pairs[2 * kHalf] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  const bool is_odd = lane % 2 != 0;
  if constexpr (kPaired) {  // an even lane's unit is of the first loads, an odd one's of the second; its own half first
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const uint32_t own = is_odd ? pairs[kHalf + i] : pairs[i], other = is_odd ? pairs[i] : pairs[kHalf + i];
      pairs[i] = own;
      pairs[kHalf + i] = __shfl_xor_sync(0xffffffff, other, 1);
    }
  }
  uint32_t magnitudes[2 * kHalf], largest = 0;
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    magnitudes[i] = ptx::abs_bf16x2(pairs[i]);
    largest = i == 0 ? magnitudes[0] : ptx::max_nan_bf16x2(largest, magnitudes[i]);
  }
  if constexpr (kFormat != Format::kNvfp4) {  // the group's other unit is the next lane's of the same load
    largest = ptx::max_nan_bf16x2(largest, __shfl_xor_sync(0xffffffff, largest, kPaired ? 2 : 1));
  }
  float scale = 0.0f;
  const uint32_t byte = scale_of_pairs<kFormat>(max(largest << 16, largest & 0xffff0000), tensor_scale, scale);
  const uint64_t unit = static_cast<uint64_t>(index) * 32 + (kPaired ? lane / 2 + (is_odd ? 16 : 0) : lane);
  uint8_t* scales = static_cast<uint8_t*>(arguments.scales);
  if constexpr (kFormat == Format::kNvfp4) {
    scales[unit] = static_cast<uint8_t>(byte);
  } else if (unit % 2 == 0) {
    scales[unit / 2] = static_cast<uint8_t>(byte);
  }
  const PairBoundaries boundaries(scale);
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) pairs[i] = boundaries.codes_of(pairs[i], magnitudes[i]);
  uint32_t words[2];
  join_codes(pairs, words);
  const bool swaps = kPaired && is_odd;
  reinterpret_cast<uint2*>(arguments.codes)[unit] = make_uint2(words[swaps ? 1 : 0], words[swaps ? 0 : 1]);
}
#endif

template <class T, Format kFormat, bool kStochastic, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2) quantize(const __grid_constant__ QuantizeArguments arguments) {
  const Unit unit(arguments.group, arguments.groups);
  const bool is_inside = unit.row < arguments.rows;
  float values[kUnit];
  load_unit<T, kAligned>(static_cast<const T*>(arguments.x) + unit.row * arguments.row_stride, unit.column,
                         arguments.columns, is_inside, values);
  Range range{0, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    range.amax = max(range.amax, bits_of(values[i]) & 0x7fffffff);
    range.low = fminf(range.low, values[i]);
    range.high = fmaxf(range.high, values[i]);
  }
  if constexpr (kFormat != Format::kNvfp4) {
    for (int distance = 1; distance < arguments.group / kUnit; distance *= 2) {
      range.amax = max(range.amax, __shfl_xor_sync(0xffffffff, range.amax, distance));
      if constexpr (is_integer(kFormat)) {
        range.low = fminf(range.low, __shfl_xor_sync(0xffffffff, range.low, distance));
        range.high = fmaxf(range.high, __shfl_xor_sync(0xffffffff, range.high, distance));
      }
    }
  }
  if (!is_inside) return;
  const float tensor_scale = arguments.tensor_scale != nullptr ? *arguments.tensor_scale : 1.0f;
  const GroupScale scale = scale_of<kFormat>(range, arguments.zeros != nullptr, kTypeOf<T>, tensor_scale);
  if (unit.leads) {
    const int64_t place = unit.row * arguments.groups + unit.group;
    if constexpr (is_integer(kFormat)) {
      static_cast<T*>(arguments.scales)[place] = tile::from_float<T>(scale.stored);
      if (arguments.zeros != nullptr) arguments.zeros[place] = static_cast<uint8_t>(scale.zero);
    } else {
      static_cast<uint8_t*>(arguments.scales)[place] = static_cast<uint8_t>(scale_byte<kFormat>(scale.stored));
    }
  }
  if (unit.column >= arguments.columns) return;
  uint32_t codes[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    uint32_t random = 0;
    if constexpr (kStochastic) {
      const int64_t element = unit.row * arguments.columns + unit.column + i;
      const PhiloxBlock block =
          philox(static_cast<uint64_t>(arguments.seed[0]), static_cast<uint64_t>(arguments.seed[1]),
                 static_cast<uint64_t>(element / kPhiloxElements));
      random = block.words[element % kPhiloxElements / 2] >> (element % 2 * 16) & 0xffff;
    }
    codes[i] = unit.column + i < arguments.columns ? code_of<kFormat, kStochastic>(values[i], scale, random) : 0;
  }
  store_codes<kFormat, kAligned>(arguments.codes + unit.row * arguments.code_stride, unit.column, arguments.columns,
                                 codes);
}

__device__ __forceinline__ float load_scale(const void* scales, ScaleType type, int64_t place) {
  switch (type) {
    case ScaleType::kE4M3:
      return e4m3_value(static_cast<const uint8_t*>(scales)[place]);
    case ScaleType::kE8M0:
      return e8m0_value(static_cast<const uint8_t*>(scales)[place]);
    case ScaleType::kFloat32:
      return static_cast<const float*>(scales)[place];
    case ScaleType::kBFloat16:
      return tile::to_float(static_cast<const tile::BFloat16*>(scales)[place]);
    default:
      return tile::to_float(static_cast<const tile::Float16*>(scales)[place]);
  }
}

#if __CUDA_ARCH__ >= 890
// E2M1 to E4M3, 16 codes: the eight magnitudes times the factors as bytes are a table of two words, of which a
// permutation takes four at once. With the sign in a selector it repeats bit 7 of a byte, which 0x80 turns into the
// sign's place one bit lower.
__device__ __forceinline__ void e2m1_to_e4m3(const uint32_t (&codes)[2], float scale, float tensor_scale,
                                             uint32_t (&bytes)[4]) {
  uint32_t table[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = e2m1_value(4 * i + j) * scale * tensor_scale;
    table[i] = tile::Word<tile::Float8E4M3>::pack(values);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t four = codes[i / 2] >> (i % 2 * 16);
    const uint32_t magnitudes = ptx::prmt(table[0], table[1], four & 0x7777);
    const uint32_t signs = ptx::prmt(0x80808080, 0x80808080, four);
    bytes[i] = (signs << 1 & 0x80808080) ^ magnitudes;  // a scale may be negative too
  }
}
#endif
template <class T>
constexpr bool kIsE4M3 = false;
template <>
constexpr bool kIsE4M3<tile::Float8E4M3> = true;

// 16 columns, by floats.
template <class T, Format kFormat, bool kAligned, int kWords>
__device__ __forceinline__ void store_values(const DequantizeArguments& arguments, const Unit& unit,
                                             const uint32_t (&words)[kWords], float scale, float tensor_scale,
                                             T* target) {
  constexpr int kBits = code_bits(kFormat);
  const int64_t place = unit.row * arguments.groups + unit.group;
  const int32_t zero = arguments.zeros != nullptr ? arguments.zeros[place] : middle_code(kFormat);
  float values[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    uint32_t code = words[i * kBits / 32] >> (i * kBits % 32);
    if constexpr (is_bit_stream(kFormat)) {
      if (i * kBits % 32 + kBits > 32) code |= words[i * kBits / 32 + 1] << (32 - i * kBits % 32);
    }
    code &= last_code(kFormat);
    values[i] = code_value<kFormat>(code, zero) * scale;
    if constexpr (kFormat == Format::kNvfp4) values[i] *= tensor_scale;
  }
  if constexpr (kAligned) {
    constexpr int kCount = tile::Vector<T>::kCount;
#pragma unroll
    for (int i = 0; i < kUnit / kCount; ++i) {
      float part[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) part[j] = values[i * kCount + j];
      tile::store(target + i * kCount, tile::Vector<T>::pack(part));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (unit.column + i < arguments.columns) target[i] = tile::from_float<T>(values[i]);
    }
  }
}

template <class T, Format kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads) dequantize(const __grid_constant__ DequantizeArguments arguments) {
  constexpr int kBits = code_bits(kFormat), kBytes = kUnit / 8 * kBits;
  const Unit unit(arguments.group, arguments.groups);
  if (unit.row >= arguments.rows || unit.column >= arguments.columns) return;
  const uint8_t* source =
      arguments.codes + unit.row * arguments.code_stride + static_cast<int64_t>(unit.column) / 8 * kBits;
  uint32_t words[(kBytes + 3) / 4] = {};
  if constexpr (kAligned && is_bit_stream(kFormat)) {
#pragma unroll
    for (int i = 0; i < kBytes / 2; ++i) {
      words[i / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(source)[i]) << (i % 2 * 16);
    }
  } else if constexpr (kAligned && has_4_bits(kFormat)) {
    const uint2 pair = *reinterpret_cast<const uint2*>(source);
    words[0] = pair.x;
    words[1] = pair.y;
  } else if constexpr (kAligned) {
    const ptx::Word4 all = ptx::ld_global_nc_v4(source);
    words[0] = all.x;
    words[1] = all.y;
    words[2] = all.z;
    words[3] = all.w;
  } else {
    const int32_t bytes = (min(arguments.columns - unit.column, kUnit) * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (i < bytes) words[i / 4] |= static_cast<uint32_t>(source[i]) << (i % 4 * 8);
    }
  }
  const int64_t place = unit.row * arguments.groups + unit.group;
  const float scale = load_scale(arguments.scales, arguments.scale_type, place);
  const float tensor_scale = arguments.tensor_scale != nullptr ? *arguments.tensor_scale : 1.0f;
  T* target = static_cast<T*>(arguments.output) + unit.row * arguments.row_stride + unit.column;
#if __CUDA_ARCH__ >= 890
  if constexpr (kIsE4M3<T> && is_e2m1(kFormat) && kAligned) {
    uint32_t bytes[4];
    e2m1_to_e4m3(words, scale, kFormat == Format::kNvfp4 ? tensor_scale : 1.0f, bytes);
    ptx::st_global_v4(target, {bytes[0], bytes[1], bytes[2], bytes[3]});
  } else
#endif
  {
    store_values<T, kFormat, kAligned>(arguments, unit, words, scale, tensor_scale, target);
  }
}

}  // namespace kernel_pytorch::group_quantize
