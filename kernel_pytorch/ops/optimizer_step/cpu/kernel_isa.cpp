// An optimizer's step on the lanes of the CPU, built once per instruction level. 8-bit states are taken a group at a
// time: elements are updated and their new states kept in a small buffer, then coded when the group's scale is known.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cpu/chunk.h"

namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE {
namespace {

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

KP_PRIMITIVE Vec float_of(VecI x) {
  return __builtin_convertvector(x, Vec);
}

// States of a group: the dynamic storage's before the step, the new ones until their scales are known.
template <int kGroup>
struct Kept {
  alignas(64) float firsts[kGroup];
  alignas(64) float seconds[kGroup];  // companded, after the step: their roots
  VecU first_largest;
  VecU second_largest;
};

// Tables are read element by element, since most levels have no instruction that reads many places at once. What is
// beyond the end becomes 0, so that it does not count for the scale.
template <Rule kRule, int kGroup>
KP_PRIMITIVE void decode_dynamic(const ChunkArguments& chunk, int64_t begin, int64_t elements, float first_scale,
                                 float second_scale, Kept<kGroup>& kept) {
  const uint8_t* firsts = static_cast<const uint8_t*>(chunk.first) + begin;
  for (int64_t i = 0; i < elements; ++i) kept.firsts[i] = dynamic_first(*chunk.first_map, firsts[i]) * first_scale;
  for (int64_t i = elements; i < kGroup; ++i) kept.firsts[i] = kept.seconds[i] = 0;
  if constexpr (kRule == Rule::kAdamW) {
    const uint8_t* seconds = static_cast<const uint8_t*>(chunk.second) + begin;
    for (int64_t i = 0; i < elements; ++i) {
      kept.seconds[i] = chunk.second_map->magnitudes[seconds[i]] * second_scale;
    }
  }
}
template <Rule kRule, int kGroup>
KP_PRIMITIVE void encode_dynamic(const ChunkArguments& chunk, int64_t begin, int64_t elements, float first_inverse,
                                 float second_inverse, const Kept<kGroup>& kept) {
  uint8_t* firsts = static_cast<uint8_t*>(chunk.first) + begin;
  for (int64_t i = 0; i < elements; ++i) {
    const float scaled = kept.firsts[i] * first_inverse;
    const uint32_t bits = __builtin_bit_cast(uint32_t, scaled);
    firsts[i] = static_cast<uint8_t>(dynamic_first_code(*chunk.first_map, scaled, bits));
  }
  if constexpr (kRule == Rule::kAdamW) {
    uint8_t* seconds = static_cast<uint8_t*>(chunk.second) + begin;
    for (int64_t i = 0; i < elements; ++i) {
      const float scaled = kept.seconds[i] * second_inverse;
      const uint32_t bits = __builtin_bit_cast(uint32_t, scaled);
      seconds[i] = static_cast<uint8_t>(nearest_rank(*chunk.second_map, scaled, bits));
    }
  }
}

// The states of kLanes elements of the group whose scales are given.
template <Storage kStorage, int kGroup, class Count>
KP_PRIMITIVE Vec load_first(const ChunkArguments& chunk, int64_t begin, int64_t offset, float scale,
                            const Kept<kGroup>& kept, Count count) {
  if constexpr (kStorage == Storage::kFloat) {
    return load(static_cast<const float*>(chunk.first) + begin + offset, count);
  } else if constexpr (kStorage == Storage::kCompanded) {
    const uint8_t* from = static_cast<const uint8_t*>(chunk.first) + begin + offset;
    const Vec compressed = float_of(signed_codes(load_bits<cpu::VecU8>(from, count)));
    return LaneMath::mul(compressed / (254.0f - cpu::abs(compressed)), scale);
  } else {
    return cpu::load(kept.firsts + offset);
  }
}
template <Storage kStorage, int kGroup, class Count>
KP_PRIMITIVE Vec load_second(const ChunkArguments& chunk, int64_t begin, int64_t offset, float scale,
                             const Kept<kGroup>& kept, Count count) {
  if constexpr (kStorage == Storage::kFloat) {
    return load(static_cast<const float*>(chunk.second) + begin + offset, count);
  } else if constexpr (kStorage == Storage::kCompanded) {
    const uint8_t* from = static_cast<const uint8_t*>(chunk.second) + begin + offset;
    const Vec root = LaneMath::mul(float_of((VecI)load_bits<cpu::VecU8>(from, count)), scale * kRootUnit);
    return LaneMath::mul(root, root);
  } else {
    return cpu::load(kept.seconds + offset);
  }
}

template <Rule kRule, Storage kStorage, class P, int kGroup, class Count>
KP_PRIMITIVE void update_lanes(const ChunkArguments& chunk, int64_t begin, int64_t offset, float first_scale,
                               float second_scale, Kept<kGroup>& kept, Count count) {
  const int64_t i = begin + offset;
  const bool has_first = kRule != Rule::kSgd || chunk.first != nullptr;
  Element<Vec> element{};
  element.parameter = load_parameter<P>(chunk, i, count);
  element.gradient = load(static_cast<const P*>(chunk.gradient) + i, count);
  if (has_first) element.first = load_first<kStorage>(chunk, begin, offset, first_scale, kept, count);
  if constexpr (kRule == Rule::kAdamW)
    element.second = load_second<kStorage>(chunk, begin, offset, second_scale, kept, count);
  update<LaneMath, kRule>(element, has_first, chunk.factors);
  store_parameter<P>(chunk, i, element.parameter, count);
  if constexpr (kStorage == Storage::kFloat) {
    if (has_first) store(static_cast<float*>(chunk.first) + i, element.first, count);
    if constexpr (kRule == Rule::kAdamW) store(static_cast<float*>(chunk.second) + i, element.second, count);
  } else {
    cpu::store(kept.firsts + offset, element.first);
    kept.first_largest = cpu::max(kept.first_largest, cpu::bits_of(cpu::abs(element.first)));
    if constexpr (kRule == Rule::kAdamW) {
      const Vec second = kStorage == Storage::kCompanded ? element.root : element.second;
      cpu::store(kept.seconds + offset, second);
      kept.second_largest = cpu::max(kept.second_largest, cpu::bits_of(cpu::abs(second)));
    }
  }
}

KP_PRIMITIVE float largest_of(VecU bits) {
  uint32_t largest = bits[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = bits[lane] > largest ? bits[lane] : largest;
  return __builtin_bit_cast(float, largest);
}

template <Rule kRule, class Count>
KP_PRIMITIVE void store_companded(const ChunkArguments& chunk, int64_t i, Vec first, Vec root, float first_inverse,
                                  float root_inverse, Count count) {
  const VecU firsts = first_code<LaneMath>(first, first_inverse) & 0xffu;
  store_codes(static_cast<uint8_t*>(chunk.first) + i, firsts, count);
  if constexpr (kRule == Rule::kAdamW) {
    const VecU seconds = root_code<LaneMath>(root, root_inverse * 255.0f) & 0xffu;
    store_codes(static_cast<uint8_t*>(chunk.second) + i, seconds, count);
  }
}

// Calls apply(offset, count) for the vectors of a group.
template <class Apply>
KP_PRIMITIVE void for_vectors(int64_t elements, const Apply& apply) {
  int64_t offset = 0;
  for (; offset + kLanes <= elements; offset += kLanes) apply(offset, All());
  if (offset < elements) apply(offset, Some{elements - offset});
}

template <Rule kRule, Storage kStorage, class P>
void step(const ChunkArguments& chunk) {
  if constexpr (kStorage == Storage::kFloat) {
    Kept<kLanes> unused;
    for_vectors(
        chunk.count, [&](int64_t offset, auto count) __attribute__((always_inline)) {
          update_lanes<kRule, kStorage, P, kLanes>(chunk, 0, offset, 0, 0, unused, count);
        });
  } else {
    constexpr int kGroup = group_elements(kStorage);
    for (int64_t begin = 0, group = 0; begin < chunk.count; begin += kGroup, ++group) {
      const int64_t elements = chunk.count - begin < kGroup ? chunk.count - begin : kGroup;
      Kept<kGroup> kept;
      kept.first_largest = kept.second_largest = VecU{};
      const float first_scale = chunk.first_scale[group];
      const float second_scale = kRule == Rule::kAdamW ? chunk.second_scale[group] : 0.0f;
      if constexpr (kStorage == Storage::kDynamic) {
        decode_dynamic<kRule>(chunk, begin, elements, first_scale, second_scale, kept);
      }
      for_vectors(
          elements, [&](int64_t offset, auto count) __attribute__((always_inline)) {
            update_lanes<kRule, kStorage, P>(chunk, begin, offset, first_scale, second_scale, kept, count);
          });
      const float first = largest_of(kept.first_largest), first_inverse = inverse_of_scale<LaneMath>(first);
      const float second = largest_of(kept.second_largest), second_inverse = inverse_of_scale<LaneMath>(second);
      chunk.first_scale[group] = first;
      if constexpr (kRule == Rule::kAdamW) chunk.second_scale[group] = second;
      if constexpr (kStorage == Storage::kDynamic) {
        encode_dynamic<kRule>(chunk, begin, elements, first_inverse, second_inverse, kept);
      } else {
        for_vectors(
            elements, [&](int64_t offset, auto count) __attribute__((always_inline)) {
              const Vec root = kRule == Rule::kAdamW ? cpu::load(kept.seconds + offset) : Vec{};
              store_companded<kRule>(chunk, begin + offset, cpu::load(kept.firsts + offset), root, first_inverse,
                                     second_inverse, count);
            });
      }
    }
  }
}

#define KP_TYPES(rule, storage) \
  { step<rule, storage, float>, step<rule, storage, BFloat16>, step<rule, storage, Float16> }
#define KP_STORAGES(rule) \
  { KP_TYPES(rule, Storage::kFloat), KP_TYPES(rule, Storage::kCompanded), KP_TYPES(rule, Storage::kDynamic) }

}  // namespace

extern const ChunkKernels kChunkKernels = {
    {KP_STORAGES(Rule::kAdamW), KP_STORAGES(Rule::kLion), KP_STORAGES(Rule::kSgd)}};

#undef KP_TYPES
#undef KP_STORAGES

}  // namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE
