// An optimizer's step with plain states on the lanes of the CPU, built once per instruction level: every tensor is read
// and written once, in step with the others. The bare step has a loop of its own; what masters, amsgrad and random bits
// add is decided per vector, where memory's time hides it.
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/optimizer_step/cpu/lanes.h"
#include "kernel_pytorch/ops/optimizer_step/draws_cuda.h"

namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE {
namespace {

// Random bits of so many elements are drawn at a time: whole rounds of philox_blocks at every level.
constexpr int64_t kDrawnElements = 512;
struct Drawn {
  alignas(64) uint32_t words[3][kDrawnElements / 2];

  KP_PRIMITIVE void draw(Drawn& drawn, const ChunkArguments& chunk, int64_t begin, Draw draw) {
    const uint64_t block = draw_block(chunk.block + static_cast<uint64_t>(begin / 8), draw);
    for (int64_t i = 0; i < kDrawnElements / 8; i += kLanes) {
      cpu::philox_blocks(chunk.seed, chunk.offset, block + static_cast<uint64_t>(i),
                         drawn.words[static_cast<int>(draw)] + 4 * i);
    }
  }
};

// Elements are taken two vectors at a time, or so many as are left at the end. Where every tensor is bf16 a pair is the
// even and the odd elements of a stretch: a shift and a mask apart, where consecutive ones would be shuffled.
enum class Order : uint8_t { kConsecutive, kEvenOdd };
struct Two {};
using Pair = cpu::Pair<Vec>;

template <Order kOrder, class T>
KP_PRIMITIVE Pair load_pair(const T* from, Two) {
  return kOrder == Order::kEvenOdd ? cpu::load2_unordered(from) : cpu::load2(from);
}
template <Order kOrder, class T>
KP_PRIMITIVE Pair load_pair(const T* from, Some some) {
  return {cpu::load_partial(from, some.count), Vec{}};
}

template <Order kOrder, class T>
KP_PRIMITIVE void store_pair(T* to, const Pair& pair, Two) {
  if constexpr (kOrder == Order::kEvenOdd) {
    cpu::store2_unordered<T, true>(to, pair);  // in this order every tensor is bf16
  } else {
    cpu::store2(to, pair);
  }
}
template <Order kOrder, class T>
KP_PRIMITIVE void store_pair(T* to, const Pair& pair, Some some) {
  cpu::store_partial(to, pair.low, some.count);
}

// Lower halves of lanes that decide whether bits round up.
template <Order kOrder>
KP_PRIMITIVE cpu::Pair<VecU> load_random(const uint16_t* random) {
  if constexpr (kOrder == Order::kEvenOdd) {
    const auto words = cpu::load_storage<VecU>(random);
    return {words & 0xffffu, words >> 16};
  } else {
    return {cpu::widen_bits(cpu::load_storage<cpu::VecU16>(random)),
            cpu::widen_bits(cpu::load_storage<cpu::VecU16>(random + kLanes))};
  }
}
KP_PRIMITIVE Vec round_up_by(Vec value, VecU random) {
  const VecU bits = cpu::bits_of(value);
  return cpu::from_bits(cpu::select(cpu::is_nan(value), bits, (bits + random) & 0xffff0000u));
}

// Rounds up with the probability that the lower half tells, where T is bf16 and bits were drawn.
template <Order kOrder, class T, class Count>
KP_PRIMITIVE void store_rounded(T* to, Pair pair, const uint16_t* random, Count count) {
  if constexpr (__is_same(T, BFloat16)) {
    if (random != nullptr) {
      const cpu::Pair<VecU> drawn = load_random<kOrder>(random);
      pair = {round_up_by(pair.low, drawn.low), round_up_by(pair.high, drawn.high)};
    }
  }
  store_pair<kOrder>(to, pair, count);  // exact where it was rounded above
}

// Weights with a correction, a vector at a time.
template <class P>
KP_PRIMITIVE Pair load_corrected(const ChunkArguments& chunk, int64_t i, Two) {
  return {load_parameter<P>(chunk, i, All()), load_parameter<P>(chunk, i + kLanes, All())};
}
template <class P>
KP_PRIMITIVE Pair load_corrected(const ChunkArguments& chunk, int64_t i, Some some) {
  return {load_parameter<P>(chunk, i, some), Vec{}};
}
template <class P>
KP_PRIMITIVE void store_corrected(const ChunkArguments& chunk, int64_t i, const Pair& pair, Two) {
  store_parameter<P>(chunk, i, pair.low, All());
  store_parameter<P>(chunk, i + kLanes, pair.high, All());
}
template <class P>
KP_PRIMITIVE void store_corrected(const ChunkArguments& chunk, int64_t i, const Pair& pair, Some some) {
  store_parameter<P>(chunk, i, pair.low, some);
}

template <class P, class S>
struct Pointers {
  P* parameter;
  const P* gradient;
  S* first;
  S* second;
  S* maximum;
  float* master;
};

// kBare: parameter, gradient and states alone.
template <Rule kRule, bool kBare, Order kOrder, class P, class S, class Count>
KP_PRIMITIVE void update_pair(const Pointers<P, S>& at, const ChunkArguments& chunk, const Factors& factors, int64_t i,
                              const uint16_t* const (&random)[3], Count count) {
  constexpr bool kHasSecond = kRule == Rule::kAdamW;
  const Keeps keeps{.first = kRule != Rule::kSgd || at.first != nullptr,
                    .maximum = !kBare && kHasSecond && at.maximum != nullptr};
  const bool has_master = !kBare && at.master != nullptr, has_correction = !kBare && chunk.correction != nullptr;
  const Pair gradient = load_pair<kOrder>(at.gradient + i, count);
  const Pair first = keeps.first ? load_pair<kOrder>(at.first + i, count) : Pair{};
  const Pair second = kHasSecond ? load_pair<kOrder>(at.second + i, count) : Pair{};
  const Pair maximum = keeps.maximum ? load_pair<kOrder>(at.maximum + i, count) : Pair{};
  const Pair parameter = has_master       ? load_pair<Order::kConsecutive>(at.master + i, count)
                         : has_correction ? load_corrected<P>(chunk, i, count)
                                          : load_pair<kOrder>(at.parameter + i, count);
  Element<Vec> low{parameter.low, gradient.low, first.low, second.low, maximum.low, Vec{}};
  Element<Vec> high{parameter.high, gradient.high, first.high, second.high, maximum.high, Vec{}};
  update<LaneMath, kRule>(low, keeps, factors);
  update<LaneMath, kRule>(high, keeps, factors);
  if (keeps.first) store_rounded<kOrder>(at.first + i, {low.first, high.first}, kBare ? nullptr : random[1], count);
  if (kHasSecond) store_rounded<kOrder>(at.second + i, {low.second, high.second}, kBare ? nullptr : random[2], count);
  if (keeps.maximum) store_rounded<kOrder>(at.maximum + i, {low.maximum, high.maximum}, random[2], count);
  if (has_master) store_pair<Order::kConsecutive>(at.master + i, {low.parameter, high.parameter}, count);
  if (has_correction) return store_corrected<P>(chunk, i, {low.parameter, high.parameter}, count);
  store_rounded<kOrder>(at.parameter + i, {low.parameter, high.parameter}, kBare ? nullptr : random[0], count);
}

// So far ahead that hardware prefetching which stops at every page is bridged.
template <class T>
KP_PRIMITIVE void prefetch_pair(const T* from, int64_t ahead_bytes) {
  const char* address = reinterpret_cast<const char*>(from) + ahead_bytes;
  for (int line = 0; line < static_cast<int>(2 * kLanes * sizeof(T)); line += 64) cpu::prefetch_near(address + line);
}

template <Rule kRule, class P, class S, bool kBare, Order kOrder>
KP_PRIMITIVE void update_range(const ChunkArguments& chunk, int64_t begin, int64_t end, const Drawn* drawn) {
  const Pointers<P, S> at{static_cast<P*>(chunk.parameter), static_cast<const P*>(chunk.gradient),
                          static_cast<S*>(chunk.first),     static_cast<S*>(chunk.second),
                          static_cast<S*>(chunk.maximum),   chunk.master};
  const uint16_t* random[3] = {nullptr, nullptr, nullptr};
  const auto point_at = [&](int64_t i) {
    for (int draw = 0; draw < 3 && drawn != nullptr; ++draw) {
      random[draw] = reinterpret_cast<const uint16_t*>(drawn->words[draw]) + (i - begin);
    }
  };
  const Factors factors = chunk.factors;  // stores cannot change a copy: it stays in registers
  const int64_t ahead = chunk.prefetch_bytes;
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
    if constexpr (!kBare) point_at(i);
    if (ahead > 0) {
      prefetch_pair(at.gradient + i, ahead);
      prefetch_pair(at.first + i, ahead);
      if (kRule == Rule::kAdamW) prefetch_pair(at.second + i, ahead);
      prefetch_pair(at.parameter + i, ahead);
      if (!kBare && at.master != nullptr) prefetch_pair(at.master + i, ahead);
    }
    update_pair<kRule, kBare, kOrder>(at, chunk, factors, i, random, Two());
  }
  for (; i < end; i += kLanes) {
    if constexpr (!kBare) point_at(i);
    const int64_t left = end - i < kLanes ? end - i : kLanes;
    update_pair<kRule, kBare, Order::kConsecutive>(at, chunk, factors, i, random, Some{left});
  }
}

template <Rule kRule, class P, class S>
void step(const ChunkArguments& chunk) {
  constexpr bool kAllNarrow = __is_same(P, BFloat16) && __is_same(S, BFloat16);
  constexpr Order kOrder = kAllNarrow ? Order::kEvenOdd : Order::kConsecutive;
  const bool has_weights_bits = chunk.master != nullptr || chunk.correction != nullptr;
  if (chunk.maximum == nullptr && !has_weights_bits && !chunk.is_stochastic) {
    return update_range<kRule, P, S, true, kOrder>(chunk, 0, chunk.count, nullptr);
  }
  Drawn drawn;
  for (int64_t begin = 0; begin < chunk.count; begin += kDrawnElements) {
    if (chunk.is_stochastic) {
      if constexpr (__is_same(P, BFloat16)) Drawn::draw(drawn, chunk, begin, Draw::kParameter);
      if constexpr (__is_same(S, BFloat16)) {
        Drawn::draw(drawn, chunk, begin, Draw::kFirst);
        Drawn::draw(drawn, chunk, begin, Draw::kSecond);
      }
    }
    const int64_t end = begin + kDrawnElements < chunk.count ? begin + kDrawnElements : chunk.count;
    const Drawn* bits = chunk.is_stochastic ? &drawn : nullptr;
    if (kAllNarrow && !has_weights_bits) {  // a master is fp32, whose elements are not apart so cheaply
      update_range<kRule, P, S, false, kOrder>(chunk, begin, end, bits);
    } else {
      update_range<kRule, P, S, false, Order::kConsecutive>(chunk, begin, end, bits);
    }
  }
}

#define KP_FLOAT_STATES(rule) step<rule, float, float>, step<rule, BFloat16, float>, step<rule, Float16, float>

}  // namespace

extern const PlainKernels kPlainKernels = {
    {KP_FLOAT_STATES(Rule::kAdamW), step<Rule::kAdamW, float, BFloat16>, step<Rule::kAdamW, BFloat16, BFloat16>,
     step<Rule::kAdamW, Float16, Float16>},
    {KP_FLOAT_STATES(Rule::kLion)},
    {KP_FLOAT_STATES(Rule::kSgd)}};

#undef KP_FLOAT_STATES

}  // namespace kernel_pytorch::optimizer_step::KP_ISA_NAMESPACE
