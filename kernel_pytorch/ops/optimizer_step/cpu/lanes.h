// What both CPU kernels of an optimizer's step are made of: the arithmetic on lanes, whole and partial vectors, and
// masters of 24 bits. For *_isa.cpp alone.
#pragma once

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cpu/chunk.h"

namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE {

using cpu::kLanes;
using cpu::Vec;
using cpu::VecI;
using cpu::VecU;

KP_PRIMITIVE Vec lanes(Vec v) {
  return v;
}
KP_PRIMITIVE Vec lanes(float value) {
  return cpu::broadcast(value);
}

// Every operation rounds once: products are kept out of FMAs that the compiler would make of them.
struct LaneMath {
  template <class A, class B>
  KP_PRIMITIVE Vec mul(A a, B b) {
    return cpu::uncontracted(a * b);
  }
  KP_PRIMITIVE Vec add(Vec a, float b) { return a + b; }
  KP_PRIMITIVE Vec sub(Vec a, Vec b) { return a - b; }
  template <class B, class C>
  KP_PRIMITIVE Vec fma(Vec a, B b, C c) {
    return cpu::fma_once(a, lanes(b), lanes(c));
  }
  KP_PRIMITIVE Vec root(Vec x) { return cpu::select(x < kLeastSquare, Vec{}, cpu::sqrt(x)); }
  KP_PRIMITIVE Vec reciprocal(Vec x) { return 1.0f / x; }
  KP_PRIMITIVE float scalar_reciprocal(float x) { return 1.0f / x; }
  KP_PRIMITIVE Vec abs(Vec x) { return cpu::abs(x); }
  KP_PRIMITIVE Vec at_least(Vec x, float least) { return cpu::max(lanes(least), x); }
  KP_PRIMITIVE Vec larger(Vec x, Vec y) { return cpu::select((x > y) | cpu::is_nan(x), x, y); }
  KP_PRIMITIVE Vec sign(Vec x) {
    return cpu::select(x > 0, cpu::broadcast(1.0f), cpu::select(x < 0, cpu::broadcast(-1.0f), x));
  }
  KP_PRIMITIVE VecU min_bits(VecU a, uint32_t b) { return cpu::min(a, cpu::broadcast(b)); }
  KP_PRIMITIVE VecU max_bits(VecU a, VecU b) { return cpu::max(a, b); }
  KP_PRIMITIVE VecU bits(Vec x) { return cpu::bits_of(x); }
  KP_PRIMITIVE VecU quiet_bits(Vec x) {
    return cpu::select(cpu::is_nan(x), cpu::broadcast(0x7fc00000u), cpu::bits_of(x));
  }
};

// Whole vectors, or the first `count` lanes of one.
struct All {};
struct Some {
  int64_t count;
};
template <class T>
KP_PRIMITIVE Vec load(const T* from, All) {
  return cpu::load(from);
}
template <class T>
KP_PRIMITIVE Vec load(const T* from, Some some) {
  return cpu::load_partial(from, some.count);
}
template <class T>
KP_PRIMITIVE void store(T* to, Vec value, All) {
  cpu::store(to, value);
}
template <class T>
KP_PRIMITIVE void store(T* to, Vec value, Some some) {
  cpu::store_partial(to, value, some.count);
}
template <class Storage>
KP_PRIMITIVE VecU load_bits(const void* from, All) {
  return cpu::widen_bits(cpu::load_storage<Storage>(from));
}
template <class Storage>
KP_PRIMITIVE VecU load_bits(const void* from, Some some) {
  return cpu::widen_bits(cpu::load_storage_partial<Storage, sizeof(Storage) / kLanes>(from, some.count));
}
KP_PRIMITIVE void store_codes(uint8_t* to, VecU codes, All) {
  cpu::store_storage(to, cpu::narrow_to_8(codes));
}
KP_PRIMITIVE void store_codes(uint8_t* to, VecU codes, Some some) {
  cpu::store_storage_partial<cpu::VecU8, 1>(to, cpu::narrow_to_8(codes), some.count);
}
KP_PRIMITIVE VecI signed_codes(VecU codes) {
  return (VecI)(codes ^ 0x80u) - 0x80;
}

template <class P, class Count>
KP_PRIMITIVE Vec load_parameter(const ChunkArguments& chunk, int64_t i, Count count) {
  const P* from = static_cast<const P*>(chunk.parameter) + i;
  if constexpr (__is_same(P, BFloat16)) {
    if (chunk.correction != nullptr) {
      const VecI correction = signed_codes(load_bits<cpu::VecU8>(chunk.correction + i, count));
      return cpu::from_bits(master_bits(load_bits<cpu::VecU16>(from, count), correction));
    }
  }
  return load(from, count);
}
KP_PRIMITIVE void store_words(BFloat16* to, VecU words, All) {
  cpu::store_storage(to, cpu::narrow_to_16(words));
}
KP_PRIMITIVE void store_words(BFloat16* to, VecU words, Some some) {
  cpu::store_storage_partial<cpu::VecU16, 2>(to, cpu::narrow_to_16(words), some.count);
}
template <class P, class Count>
KP_PRIMITIVE void store_parameter(const ChunkArguments& chunk, int64_t i, Vec value, Count count) {
  P* to = static_cast<P*>(chunk.parameter) + i;
  if constexpr (__is_same(P, BFloat16)) {
    if (chunk.correction != nullptr) {
      const VecU rounded = rounded_master<LaneMath>(value);
      store_words(to, (rounded + 0x8000u) >> 16, count);
      return store_codes(chunk.correction + i, (rounded >> 8) & 0xffu, count);
    }
  }
  store(to, value, count);
}

}  // namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE
