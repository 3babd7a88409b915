// Rows in spans: columns that are worked on at once, and the bits of their dropout.
#pragma once

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/rows.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {
namespace {

using cpu::AllLanes;
using cpu::kLanes;
using cpu::SomeLanes;

// Their bits and floats fit the nearest cache.
inline constexpr int64_t kSpan = 1024;

// The bits of one span of a row.
struct SpanBits {
  alignas(64) uint16_t storage[kSpan + (cpu::kPhiloxBlocks + 1) * kPhiloxElements];
  const uint16_t* first;
};

KP_PRIMITIVE void draw(SpanBits& bits, const DropoutRows& dropout, int64_t element, int64_t count) {
  const auto first = static_cast<uint64_t>(element), skipped = first % kPhiloxElements;
  const auto blocks =
      static_cast<int64_t>(skipped + static_cast<uint64_t>(count) + kPhiloxElements - 1) / kPhiloxElements;
  for (int64_t done = 0; done < blocks; done += cpu::kPhiloxBlocks) {
    cpu::philox_many(dropout.seed, dropout.offset, first / kPhiloxElements + static_cast<uint64_t>(done),
                     reinterpret_cast<uint32_t*>(bits.storage + done * kPhiloxElements));
  }
  bits.first = bits.storage + skipped;
}

// Numbers of 16 bits, compared with signs: AVX2 has no other comparison.
KP_PRIMITIVE Vec drop_below(cpu::VecU drawn, const DropoutRows& dropout, Vec value) {
  return cpu::select(reinterpret_cast<cpu::VecI>(drawn) < static_cast<int32_t>(dropout.threshold), Vec{},
                     value * dropout.scale);
}
// Reading past a span's end stays inside the storage.
KP_PRIMITIVE Vec drop(Vec value, const SpanBits& bits, const DropoutRows& dropout, int64_t j) {
  return drop_below(cpu::widen_bits(cpu::load_storage<cpu::VecU16>(bits.first + j)), dropout, value);
}

template <class T>
KP_PRIMITIVE T* row_of(const RowsOf& rows, int64_t row) {
  return rows.data == nullptr ? nullptr : static_cast<T*>(rows.data) + row * rows.stride_elements;
}

template <class T, class Lanes>
KP_PRIMITIVE Vec biased(const T* row, const void* bias, bool bias_is_float, int64_t j, int64_t column, Lanes lanes) {
  const Vec value = cpu::load(row + j, lanes);
  if (bias == nullptr) return value;
  return value + (bias_is_float ? cpu::load(static_cast<const float*>(bias) + column + j, lanes)
                                : cpu::load(static_cast<const T*>(bias) + column + j, lanes));
}

// Where a span lies.
struct SpanPlace {
  int64_t row, column, count;
};

// Significant bits of a result.
template <class T>
inline constexpr int kBitsOf = __is_same(T, BFloat16)  ? 8
                               : __is_same(T, Float16) ? 11
                                                       : kFloatBits;

}  // namespace
}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
