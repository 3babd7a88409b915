// Few rows of x times rows of a weight in few bits, on the lanes of the CPU, built once per instruction level. A step
// is 2 * kLanes columns: kLanes bytes of 4-bit codes, whose low halves are the even columns and whose high halves the
// odd ones, so x lies in that order. With 16 lanes a vector holds the values of all 16 codes, and decoding is one
// shuffle.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/bit_stream.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/thin.h"

namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE {
namespace {

using namespace group_format;
using cpu::kLanes;
using cpu::Vec;
using cpu::VecI;
using cpu::VecU;
using cpu::VecU8;

constexpr int64_t kStep = 2 * kLanes;
static_assert(kThinStep % kStep == 0);

template <class T>
void arrange(Format format, const void* from, int64_t k, float* to) {
  const T* row = static_cast<const T*>(from);
  for (int64_t first = 0; first < k; first += kStep) {
    alignas(64) float values[kStep] = {};
    const int64_t count = k - first < kStep ? k - first : kStep;
    const int64_t lower = count < kLanes ? count : kLanes;
    cpu::store(values, cpu::load_partial(row + first, lower));
    if (count > kLanes) cpu::store(values + kLanes, cpu::load_partial(row + first + kLanes, count - kLanes));
    for (int64_t i = 0; i < kStep; ++i) {
      to[first + i] = has_4_bits(format) ? values[i < kLanes ? 2 * i : 2 * (i - kLanes) + 1] : values[i];
    }
  }
}

template <Format kFormat>
KP_PRIMITIVE float load_scale(const ThinPart& part, int64_t place) {
  if constexpr (kFormat == Format::kNvfp4) return e4m3_value(static_cast<const uint8_t*>(part.scales)[place]);
  if constexpr (has_power_scale(kFormat)) return e8m0_value(static_cast<const uint8_t*>(part.scales)[place]);
  if (part.type == ThinType::kFloat32) return static_cast<const float*>(part.scales)[place];
  if (part.type == ThinType::kFloat16) return cpu::load_partial(static_cast<const Float16*>(part.scales) + place, 1)[0];
  return group_format::from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(part.scales)[place]) << 16);
}

// Weights of integers as x's type has them; those of the other formats are exact, or smaller than fp16's smallest.
template <Format kFormat>
KP_PRIMITIVE Vec rounded(Vec weights, ThinType type) {
  if constexpr (!is_integer(kFormat)) return weights;
  if (type == ThinType::kBFloat16) return cpu::from_bits(cpu::round_to_bfloat16(weights) & 0xffff0000u);
  if (type == ThinType::kFloat16) return cpu::float16_to_float(cpu::float_to_float16(weights));
  return weights;
}

// The scales of a step's lanes; 16 lanes of 4-bit codes are two groups of 16.
template <Format kFormat>
KP_PRIMITIVE Vec scales_of(const ThinPart& part, int64_t row, int64_t first) {
  const int64_t place = row * part.groups + first / part.group;
  const float scale = load_scale<kFormat>(part, place);
  if constexpr (kFormat == Format::kNvfp4 && kStep > 16) {
    const float second = first + 16 < part.k ? load_scale<kFormat>(part, place + 1) : 0.0f;
    VecI lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;  // a constant
    return cpu::select(lane < kLanes / 2, cpu::broadcast(scale), cpu::broadcast(second));
  }
  return cpu::broadcast(scale);
}

// The values of the codes in the low four bits, or of eight.
template <Format kFormat>
KP_PRIMITIVE Vec values_of(VecU codes, int32_t zero) {
  if constexpr (is_integer(kFormat)) {
    return __builtin_convertvector(reinterpret_cast<VecI>(codes) - zero, Vec);
  } else if constexpr (is_e2m1(kFormat)) {
    const VecU magnitude = codes & 7u;
    const Vec small = __builtin_convertvector(reinterpret_cast<VecI>(magnitude), Vec) * 0.5f;
    const Vec value = cpu::select(magnitude < 2u, small, cpu::from_bits((magnitude << 22) + (126u << 23)));
    return cpu::from_bits(cpu::bits_of(value) | (codes & 8u) << 28);
  } else {
    const VecU magnitude = codes & 0x7fu;
    const Vec small = __builtin_convertvector(reinterpret_cast<VecI>(magnitude), Vec) * 0x1p-9f;
    const VecU normal = cpu::select(magnitude == 0x7fu, cpu::broadcast(kNaNBits), (magnitude << 20) + (120u << 23));
    const Vec value = cpu::select(magnitude < 8u, small, cpu::from_bits(normal));
    return cpu::from_bits(cpu::bits_of(value) | (codes & 0x80u) << 24);
  }
}

template <Format kFormat>
struct Decoder {
  const ThinPart& part;
  int64_t row;
  int64_t known_group = -1;
  Vec scales{}, table{};
  static constexpr bool kHasTable = code_bits(kFormat) <= 4 && (1 << code_bits(kFormat)) <= kLanes;
  int32_t zero = middle_code(kFormat);

  // Two vectors of values times scales: even and odd columns, or the lower and the upper half.
  KP_PRIMITIVE void decode(Decoder& self, int64_t first, Vec (&values)[2]) {
    const ThinPart& part = self.part;
    const int64_t group = first / part.group;
    if (group != self.known_group) {
      self.known_group = group;
      self.scales = scales_of<kFormat>(part, self.row, first);
      if (part.zeros != nullptr) self.zero = part.zeros[self.row * part.groups + group];
      if constexpr (kHasTable) {
        VecU codes;
        for (int i = 0; i < kLanes; ++i) codes[i] = static_cast<uint32_t>(i & last_code(kFormat));
        self.table = values_of<kFormat>(codes, self.zero);
        if constexpr (kFormat != Format::kNvfp4) self.table = rounded<kFormat>(self.table * self.scales, part.type);
      }
    }
    const int64_t count = part.k - first;
    const uint8_t* codes = part.codes + self.row * part.code_stride;
    [[maybe_unused]] const uint8_t* bytes = codes + code_bytes(kFormat, first);
    if constexpr (is_bit_stream(kFormat)) {
      for (int half = 0; half < 2; ++half) {
        const VecU stored =
            cpu::unpack_bits<code_bits(kFormat)>(codes, first + half * kLanes, code_bytes(kFormat, part.k));
        if constexpr (kHasTable) {
          values[half] = __builtin_shuffle(self.table, reinterpret_cast<VecI>(stored));
        } else {
          values[half] = rounded<kFormat>(values_of<kFormat>(stored, self.zero) * self.scales, part.type);
        }
      }
    } else if constexpr (has_4_bits(kFormat)) {
      const int64_t available = (count + 1) / 2;
      const VecU pairs = cpu::widen_bits(available >= kLanes ? cpu::load_storage<VecU8>(bytes)
                                                             : cpu::load_storage_partial<VecU8, 1>(bytes, available));
      if constexpr (kHasTable) {
        values[0] = __builtin_shuffle(self.table, reinterpret_cast<VecI>(pairs));
        values[1] = __builtin_shuffle(self.table, reinterpret_cast<VecI>(pairs >> 4));
        if constexpr (kFormat == Format::kNvfp4) {
          values[0] *= self.scales;
          values[1] *= self.scales;
        }
      } else {
        values[0] = rounded<kFormat>(values_of<kFormat>(pairs & 15u, self.zero) * self.scales, part.type);
        values[1] = rounded<kFormat>(values_of<kFormat>(pairs >> 4, self.zero) * self.scales, part.type);
      }
    } else {
      for (int half = 0; half < 2; ++half) {
        const int64_t left = count - half * kLanes, available = left < 0 ? 0 : left < kLanes ? left : kLanes;
        const VecU8 stored = available == kLanes ? cpu::load_storage<VecU8>(bytes + half * kLanes)
                             : available > 0     ? cpu::load_storage_partial<VecU8, 1>(bytes + half * kLanes, available)
                                                 : VecU8{};
        values[half] =
            rounded<kFormat>(values_of<kFormat>(cpu::widen_bits(stored), self.zero) * self.scales, part.type);
      }
    }
  }
};

template <Format kFormat, int kRows>
void multiply_rows(const ThinPart& part, int64_t first_row) {
  for (int64_t row = 0; row < part.rows; ++row) {
    Decoder<kFormat> decoder{part, row};
    Vec sums[kRows][2] = {};
    const float* x = part.x + first_row * part.x_stride;
    for (int64_t first = 0; first < part.k; first += kStep) {
      // Rows of the weight may be whole pages, at whose ends the processor stops to fetch ahead by itself.
      cpu::prefetch_near(part.codes + (row + 1) * part.code_stride + code_bytes(kFormat, first));
      Vec values[2];
      Decoder<kFormat>::decode(decoder, first, values);
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] += cpu::load(x + i * part.x_stride + first) * values[0];
        sums[i][1] += cpu::load(x + i * part.x_stride + first + kLanes) * values[1];
      }
    }
    for (int i = 0; i < kRows; ++i) {
      part.sums[(first_row + i) * part.sums_stride + row] = cpu::horizontal_sum(sums[i][0] + sums[i][1]);
    }
  }
}

template <Format kFormat>
void multiply_format(const ThinPart& part) {
  int64_t row = 0;
  for (; row + 4 <= part.m; row += 4) multiply_rows<kFormat, 4>(part, row);
  for (; row < part.m; ++row) multiply_rows<kFormat, 1>(part, row);
}

void multiply(const ThinPart& part) {
  switch (part.format) {
    case Format::kNvfp4:
      return multiply_format<Format::kNvfp4>(part);
    case Format::kMxfp4:
      return multiply_format<Format::kMxfp4>(part);
    case Format::kMxfp8:
      return multiply_format<Format::kMxfp8>(part);
    case Format::kInt4:
      return multiply_format<Format::kInt4>(part);
    case Format::kInt8:
      return multiply_format<Format::kInt8>(part);
    case Format::kInt2:
      return multiply_format<Format::kInt2>(part);
    case Format::kInt3:
      return multiply_format<Format::kInt3>(part);
    case Format::kInt5:
      return multiply_format<Format::kInt5>(part);
    case Format::kInt6:
      return multiply_format<Format::kInt6>(part);
  }
}

}  // namespace

extern const ThinKernels kThinKernels = {{arrange<float>, arrange<BFloat16>, arrange<Float16>}, multiply};

}  // namespace kernel_pytorch::quantized_matmul::KP_ISA_NAMESPACE
