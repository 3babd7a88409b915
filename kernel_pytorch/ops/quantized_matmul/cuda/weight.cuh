// 16 bytes of a row of a weight in few bits, from memory to the words of mma's first operand. mma sums over k in any
// order, so a lane takes the k of its own 16 bytes, two at a time as they come out of a word by one mask: of 4-bit
// codes columns (0, 4), (1, 5), (2, 6), (3, 7) of each eight, of 8-bit codes neighbours. x is put into the same order.
// sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/convert.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/pair_math.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantized_matmul {

using group_format::Format;

// The 16-bit types: how small integers and E2M1's bits become their numbers.
template <class T>
struct PairMath;
template <>
struct PairMath<tile::BFloat16> {
  static constexpr uint32_t kIntegerBits = 0x43004300;  // 128, whose last bit counts 1
  static constexpr float kInteger = 128.0f;
  static constexpr int kE2M1Place = 6;  // of the lowest bit: where exponent and mantissa meet
  static constexpr uint32_t kE2M1Mask = 0x01c001c0;
  static constexpr float kE2M1Factor = 0x1p126f;
  static constexpr uint32_t kOnes = 0x3f803f80;
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_rn_bf16x2(a, b, c);
  }
};
template <>
struct PairMath<tile::Float16> {
  static constexpr uint32_t kIntegerBits = 0x64006400;  // 1024
  static constexpr float kInteger = 1024.0f;
  static constexpr int kE2M1Place = 9;
  static constexpr uint32_t kE2M1Mask = 0x0e000e00;
  static constexpr float kE2M1Factor = 0x1p14f;
  static constexpr uint32_t kOnes = 0x3c003c00;
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    return ptx::fma_rn_f16x2(a, b, c);
  }
};

// Values of nvfp4 are decoded 2^9 times too small: their scales then have room for E2M1's factor in either type.
template <Format kFormat>
constexpr float kFinalFactor = kFormat == Format::kNvfp4 ? 0x1p9f : 1.0f;

template <class T>
__device__ __forceinline__ uint32_t pair_of(float value) {
  const float values[2] = {value, value};
  return tile::Word<T>::pack(values);
}

// One lane's 16 bytes of a row, and what its groups have.
template <class T, Format kFormat>
class WeightChunk {
  using Math = PairMath<T>;
  static constexpr int kColumns = 16 * group_format::codes_in_byte(kFormat);
  static constexpr uint32_t kMinusZero = 0x80008000;

 public:
  static constexpr int kWords = kColumns / 8;  // groups of eight columns: 16 bytes of x
  static constexpr int kPairs = 4;             // of each

  // At column k, a multiple of kColumns; zeros where the row or the column is outside.
  __device__ __forceinline__ void load(const WeightArguments& weight, int32_t row, int32_t rows, int32_t k,
                                       int32_t k_end) {
    const bool is_inside = row < rows && k < k_end;
    codes_ = ptx::ld_global_nc_l1_no_allocate_v4_if(
        is_inside, weight.codes + row * weight.code_stride + k / group_format::codes_in_byte(kFormat));
    zero_ = group_format::middle_code(kFormat);
    bytes_ = 0;
    if (!is_inside) return;
    const int64_t place = static_cast<int64_t>(row) * weight.groups + k / weight.group;
    if constexpr (kFormat == Format::kNvfp4) {
      bytes_ = *reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(weight.scales) + place);
    } else if constexpr (kFormat == Format::kMxfp4) {
      bytes_ = static_cast<const uint8_t*>(weight.scales)[place];
    } else {
      bytes_ = static_cast<const T*>(weight.scales)[place].bits;
      if (weight.zeros != nullptr) zero_ = weight.zeros[place];
    }
  }
  // Of what another way has brought: the scale's bytes begin at the lowest, others may follow.
  __device__ __forceinline__ void set(const ptx::Word4& codes, uint32_t scale, int32_t zero) {
    codes_ = codes;
    bytes_ = scale & (kFormat == Format::kMxfp4 ? 0xffu : 0xffffu);
    zero_ = zero;
  }

  // mxfp4: a second product is needed.
  __device__ __forceinline__ bool is_large() const { return bytes_ > 128; }
  // Integers: their scale, and what lies between their bits as `raw_pairs` has them and their values.
  __device__ __forceinline__ float float_scale() const { return tile::to_float(T{static_cast<uint16_t>(bytes_)}); }
  __device__ __forceinline__ float raw_offset() const { return Math::kInteger + static_cast<float>(zero_); }

  // What codes are multiplied by, as pairs: of each half of the columns (nvfp4), or of all; and for integers what is
  // added before.
  struct Factors {
    uint32_t scales[2];
    uint32_t offset;
    float zero;
  };
  __device__ __forceinline__ Factors factors() const {
    Factors factors{};
    if constexpr (kFormat == Format::kNvfp4) {
#if __CUDA_ARCH__ >= 890
      const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(bytes_));
#endif
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#if __CUDA_ARCH__ >= 890
        const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> (16 * half)));
#else
        const float scale = group_format::e4m3_value(bytes_ >> (8 * half) & 0xff);
#endif
        factors.scales[half] = pair_of<T>(scale * (Math::kE2M1Factor / kFinalFactor<kFormat>));
      }
    } else if constexpr (kFormat == Format::kMxfp4) {
      // E2M1's factor times the scale, and what of a power above 2 the type has no room for.
      factors.scales[0] = pair_of<T>(group_format::e8m0_value(bytes_ < 128 ? bytes_ : 128) * Math::kE2M1Factor);
      factors.scales[1] = pair_of<T>(group_format::e8m0_value(is_large() ? bytes_ - (bytes_ < 255 ? 1 : 0) : 127));
    } else {
      factors.scales[0] = bytes_ * 0x10001u;
      // -(128 + zero) and 2^23 + zero, by their bits.
      factors.offset = (Math::kIntegerBits | kMinusZero) + static_cast<uint32_t>(zero_) * 0x10001u;
      factors.zero = __uint_as_float(0x4b000000u + static_cast<uint32_t>(zero_));
    }
    return factors;
  }

  // Of 4-bit codes: the same without scale and zero, E2M1 without its factor.
  __device__ __forceinline__ void raw_pairs(int word, uint32_t (&pairs)[kPairs]) const {
    static_assert(group_format::has_4_bits(kFormat));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = kFormat == Format::kInt4 ? integer_bits(word_at(word) >> (4 * i)) : e2m1_bits(word_at(word), i);
    }
  }

  // The eight columns number `word` as four pairs, times their scale. kSmall: no scale of mxfp4 is large.
  template <bool kSmall = false>
  __device__ __forceinline__ void decode(int word, const Factors& factors, uint32_t (&pairs)[kPairs]) const {
    if constexpr (kFormat == Format::kInt8) {
      decode_bytes(word_at(2 * word), factors, pairs[0], pairs[1]);
      decode_bytes(word_at(2 * word + 1), factors, pairs[2], pairs[3]);
    } else {
      const uint32_t codes = word_at(word);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        pairs[i] =
            kFormat == Format::kInt4 ? integers(codes >> (4 * i), factors) : e2m1<kSmall>(codes, i, factors, word);
      }
    }
  }

  // What decode<true> leaves out where a scale of mxfp4 is large.
  static __device__ __forceinline__ void enlarge(const Factors& factors, uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = Math::fma(pairs[i], factors.scales[1], kMinusZero);
  }

 private:
  __device__ __forceinline__ uint32_t word_at(int index) const {
    return index == 0 ? codes_.x : index == 1 ? codes_.y : index == 2 ? codes_.z : codes_.w;
  }

  static __device__ __forceinline__ uint32_t integer_bits(uint32_t codes) {
    return ptx::lop3_and_or(codes, 0x000f000f, Math::kIntegerBits);
  }
  // (code - zero) * scale, each exact but for the last rounding.
  static __device__ __forceinline__ uint32_t integers(uint32_t codes, const Factors& factors) {
    return Math::fma(Math::fma(integer_bits(codes), Math::kOnes, factors.offset), factors.scales[0], kMinusZero);
  }
  static __device__ __forceinline__ void decode_bytes(uint32_t codes, const Factors& factors, uint32_t& first,
                                                      uint32_t& second) {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __uint_as_float(__byte_perm(codes, 0x4b000000, 0x7440 | i)) - factors.zero;
    }
    first = Math::fma(tile::Word<T>::pack(values), factors.scales[0], kMinusZero);
    second = Math::fma(tile::Word<T>::pack(values + 2), factors.scales[0], kMinusZero);
  }
  // Of both halves the code number `index`: its sign on top, the rest where exponent and mantissa meet.
  static __device__ __forceinline__ uint32_t e2m1_bits(uint32_t codes, int index) {
    constexpr uint32_t kMask = kMinusZero | Math::kE2M1Mask;
    if constexpr (Math::kE2M1Place + 4 <= 12) {
      // The code twice, its bits apart: a product puts both into place, and the mask takes what is wanted of each.
      constexpr uint32_t kTwice = (1u << Math::kE2M1Place) + (1u << 12);
      const uint32_t source = index < 2 ? codes : codes >> 8;
      return (index % 2 == 0 ? (source & 0x000f000f) * kTwice : (source & 0x00f000f0) * (kTwice >> 4)) & kMask;
    } else {
      const int shift = Math::kE2M1Place - 4 * index;
      const uint32_t magnitude = shift >= 0 ? codes << shift : codes >> -shift;
      return (codes << (12 - 4 * index) & kMinusZero) | (magnitude & Math::kE2M1Mask);
    }
  }
  template <bool kSmall>
  static __device__ __forceinline__ uint32_t e2m1(uint32_t codes, int index, const Factors& factors, int word) {
    const uint32_t bits = e2m1_bits(codes, index);
    if constexpr (kFormat == Format::kNvfp4) return Math::fma(bits, factors.scales[word / 2], kMinusZero);
    const uint32_t scaled = Math::fma(bits, factors.scales[0], kMinusZero);
    return kSmall ? scaled : Math::fma(scaled, factors.scales[1], kMinusZero);
  }

  ptx::Word4 codes_;
  uint32_t bytes_;  // of its scale, or of two
  int32_t zero_;
};

// Eight neighbouring columns of x in the order of a chunk's pairs.
template <Format kFormat>
__device__ __forceinline__ void order_pairs(const ptx::Word4& x, uint32_t (&pairs)[4]) {
  if constexpr (group_format::has_4_bits(kFormat)) {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410);
    pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410);
    pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    pairs[0] = x.x;
    pairs[1] = x.y;
    pairs[2] = x.z;
    pairs[3] = x.w;
  }
}

// E8M0 whose bits lie above a float's mantissa: 2^-127 of 0, and NaN of 255, which is infinity's exponent.
__device__ __forceinline__ float power_of_bits(uint32_t bits) {
  const float value = fmaxf(__uint_as_float(bits & 0x7f800000), 0x1p-127f);
  return fmaf(value, 0.0f, value);
}

template <Format kFormat>
__device__ __forceinline__ float factor_of(const WeightArguments& weight) {
  return kFinalFactor<kFormat> * (weight.tensor_scale != nullptr ? *weight.tensor_scale : 1.0f);
}

}  // namespace kernel_pytorch::quantized_matmul
