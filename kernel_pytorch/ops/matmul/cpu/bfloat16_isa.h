// Loads of operands that are multiplied as bf16, for the packing of amx_isa.cpp and dots_isa.cpp.
#pragma once

#include "kernel_pytorch/cpu/bfloat16_pairs.h"
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

#if defined(__AVX512F__)

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

constexpr int64_t kWords = 32;  // bf16 elements of a vector

enum class Part : uint8_t { kHigh, kLow };
KP_PRIMITIVE cpu::Vec part_of(cpu::Vec v, Part part) {
  return part == Part::kHigh ? v : v - cpu::from_bits(cpu::round_to_bfloat16(v) & 0xffff0000u);
}

// `count` (at most 32) neighbours in memory as bf16, zeros behind them.
KP_PRIMITIVE cpu::VecU load_words(const BFloat16* from, int64_t count, Part) {
  if (count >= kWords) return cpu::load_storage<cpu::VecU>(from);
  return reinterpret_cast<cpu::VecU>(_mm512_maskz_loadu_epi16(count > 0 ? (1u << count) - 1 : 0, from));
}
KP_PRIMITIVE cpu::VecU load_words(const float* from, int64_t count, Part part) {
  if (count >= kWords) {
    return cpu::to_bfloat16(part_of(cpu::load(from), part), part_of(cpu::load(from + cpu::kLanes), part));
  }
  if (count <= 0) return cpu::VecU{};
  const cpu::Vec low = cpu::load_partial(from, smaller(count, cpu::kLanes));
  const cpu::Vec high = count > cpu::kLanes ? cpu::load_partial(from + cpu::kLanes, count - cpu::kLanes) : cpu::Vec{};
  return cpu::to_bfloat16(part_of(low, part), part_of(high, part));
}

template <class T>
KP_PRIMITIVE cpu::Pairs load_pairs(const T* from, int64_t stride, int64_t pair, int64_t rows, int64_t columns,
                                   Part part) {
  const cpu::VecU even = 2 * pair < rows ? load_words(from + 2 * pair * stride, columns, part) : cpu::VecU{};
  const cpu::VecU odd = 2 * pair + 1 < rows ? load_words(from + (2 * pair + 1) * stride, columns, part) : cpu::VecU{};
  return cpu::interleave(even, odd);
}

}  // namespace
}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE

#endif
