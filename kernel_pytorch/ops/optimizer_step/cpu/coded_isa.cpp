// An optimizer's step with 8-bit states on the lanes of the CPU, built once per instruction level. A group is taken at
// a time: elements are updated and their new states kept in a small buffer, then coded when the group's scale is known.
#include "kernel_pytorch/ops/optimizer_step/cpu/lanes.h"

namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE {
namespace {

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
  if constexpr (kStorage == Storage::kCompanded) {
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
  if constexpr (kStorage == Storage::kCompanded) {
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
  Element<Vec> element{};
  element.parameter = load_parameter<P>(chunk, i, count);
  element.gradient = load(static_cast<const P*>(chunk.gradient) + i, count);
  element.first = load_first<kStorage>(chunk, begin, offset, first_scale, kept, count);
  if constexpr (kRule == Rule::kAdamW) {
    element.second = load_second<kStorage>(chunk, begin, offset, second_scale, kept, count);
  }
  update<LaneMath, kRule>(element, {.first = true, .maximum = false}, chunk.factors);
  store_parameter<P>(chunk, i, element.parameter, count);
  cpu::store(kept.firsts + offset, element.first);
  kept.first_largest = cpu::max(kept.first_largest, cpu::bits_of(cpu::abs(element.first)));
  if constexpr (kRule == Rule::kAdamW) {
    const Vec second = kStorage == Storage::kCompanded ? element.root : element.second;
    cpu::store(kept.seconds + offset, second);
    kept.second_largest = cpu::max(kept.second_largest, cpu::bits_of(cpu::abs(second)));
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

#define KP_TYPES(rule, storage) \
  { step<rule, storage, float>, step<rule, storage, BFloat16>, step<rule, storage, Float16> }
#define KP_STORAGES(rule) \
  { KP_TYPES(rule, Storage::kCompanded), KP_TYPES(rule, Storage::kDynamic) }

}  // namespace

extern const CodedKernels kCodedKernels = {
    {KP_STORAGES(Rule::kAdamW), KP_STORAGES(Rule::kLion), KP_STORAGES(Rule::kSgd)}};

#undef KP_TYPES
#undef KP_STORAGES

}  // namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE
