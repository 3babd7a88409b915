// A step of AdamW on the lanes of the CPU, built once per instruction level: every tensor is read and written once, in
// step with the others. The plain step has a loop of its own; what amsgrad, masters and random bits add is decided per
// vector, where memory's time hides it.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/adamw/cpu/chunk.h"
#include "kernel_pytorch/ops/adamw/draws_cuda.h"

namespace kernel_pytorch::adamw::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

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
struct Some {
  int64_t count;
};
using Pair = cpu::Pair<Vec>;

template <Order kOrder, class T>
KP_PRIMITIVE Pair load(const T* from, Two) {
  return kOrder == Order::kEvenOdd ? cpu::load2_unordered(from) : cpu::load2(from);
}
template <Order kOrder, class T>
KP_PRIMITIVE Pair load(const T* from, Some some) {
  return {cpu::load_partial(from, some.count), Vec{}};
}

template <Order kOrder, class T>
KP_PRIMITIVE void store(T* to, const Pair& pair, Two) {
  if constexpr (kOrder == Order::kEvenOdd) {
    cpu::store2_unordered<T, true>(to, pair);  // in this order every tensor is bf16
  } else {
    cpu::store2(to, pair);
  }
}
template <Order kOrder, class T>
KP_PRIMITIVE void store(T* to, const Pair& pair, Some some) {
  cpu::store_partial(to, pair.low, some.count);
}

// Lower halves of lanes that decide whether bits round up.
template <Order kOrder>
KP_PRIMITIVE cpu::Pair<cpu::VecU> load_random(const uint16_t* random) {
  if constexpr (kOrder == Order::kEvenOdd) {
    const auto words = cpu::load_storage<cpu::VecU>(random);
    return {words & 0xffffu, words >> 16};
  } else {
    return {cpu::widen_bits(cpu::load_storage<cpu::VecU16>(random)),
            cpu::widen_bits(cpu::load_storage<cpu::VecU16>(random + kLanes))};
  }
}
KP_PRIMITIVE Vec round_up_by(Vec value, cpu::VecU random) {
  const cpu::VecU bits = cpu::bits_of(value);
  return cpu::from_bits(cpu::select(cpu::is_nan(value), bits, (bits + random) & 0xffff0000u));
}

// Rounds up with the probability that the lower half tells, where T is bf16 and bits were drawn.
template <Order kOrder, class T, class Count>
KP_PRIMITIVE void store_rounded(T* to, Pair pair, const uint16_t* random, Count count) {
  if constexpr (__is_same(T, BFloat16)) {
    if (random != nullptr) {
      const cpu::Pair<cpu::VecU> drawn = load_random<kOrder>(random);
      pair = {round_up_by(pair.low, drawn.low), round_up_by(pair.high, drawn.high)};
    }
  }
  store<kOrder>(to, pair, count);  // exact where it was rounded above
}

template <class P, class S>
struct Pointers {
  P* parameter;
  const P* gradient;
  S* exp_avg;
  S* exp_avg_sq;
  S* max_exp_avg_sq;
  float* master;
};

struct Element {
  Vec parameter, first, second, largest;
};
KP_PRIMITIVE void update_lanes(Element& element, Vec given, bool has_maximum, const ChunkArguments& chunk) {
  const Vec gradient = given * chunk.gradient_factor;
  element.first += (gradient - element.first) * chunk.first;
  element.second = element.second * chunk.beta2 + gradient * gradient * chunk.second;
  const cpu::VecI is_larger = (element.second > element.largest) | cpu::is_nan(element.second);
  element.largest = has_maximum ? cpu::select(is_larger, element.second, element.largest) : element.second;
  const Vec denominator = cpu::sqrt(element.largest) * chunk.root + chunk.eps;
  element.parameter = element.parameter * chunk.keep - element.first * chunk.step_size / denominator;
}

template <bool kPlain, Order kOrder, class P, class S, class Count>
KP_PRIMITIVE void update_pair(const Pointers<P, S>& at, const ChunkArguments& chunk, int64_t i,
                              const uint16_t* const (&random)[3], Count count) {
  const bool has_maximum = !kPlain && at.max_exp_avg_sq != nullptr, has_master = !kPlain && at.master != nullptr;
  const Pair gradient = load<kOrder>(at.gradient + i, count);
  const Pair first = load<kOrder>(at.exp_avg + i, count), second = load<kOrder>(at.exp_avg_sq + i, count);
  const Pair largest = has_maximum ? load<kOrder>(at.max_exp_avg_sq + i, count) : Pair{};
  const Pair parameter =
      has_master ? load<Order::kConsecutive>(at.master + i, count) : load<kOrder>(at.parameter + i, count);
  Element low{parameter.low, first.low, second.low, largest.low};
  Element high{parameter.high, first.high, second.high, largest.high};
  update_lanes(low, gradient.low, has_maximum, chunk);
  update_lanes(high, gradient.high, has_maximum, chunk);
  store_rounded<kOrder>(at.exp_avg + i, {low.first, high.first}, kPlain ? nullptr : random[1], count);
  store_rounded<kOrder>(at.exp_avg_sq + i, {low.second, high.second}, kPlain ? nullptr : random[2], count);
  if (has_maximum) store_rounded<kOrder>(at.max_exp_avg_sq + i, {low.largest, high.largest}, random[2], count);
  if (has_master) store<Order::kConsecutive>(at.master + i, {low.parameter, high.parameter}, count);
  store_rounded<kOrder>(at.parameter + i, {low.parameter, high.parameter}, kPlain ? nullptr : random[0], count);
}

// So far ahead that hardware prefetching which stops at every page is bridged.
template <class T>
KP_PRIMITIVE void prefetch_pair(const T* from, int64_t ahead_bytes) {
  const char* address = reinterpret_cast<const char*>(from) + ahead_bytes;
  for (int line = 0; line < static_cast<int>(2 * kLanes * sizeof(T)); line += 64) cpu::prefetch_near(address + line);
}

template <class P, class S, bool kPlain, Order kOrder>
KP_PRIMITIVE void update_range(const ChunkArguments& chunk, int64_t begin, int64_t end, const Drawn* drawn) {
  const Pointers<P, S> at{static_cast<P*>(chunk.parameter),      static_cast<const P*>(chunk.gradient),
                          static_cast<S*>(chunk.exp_avg),        static_cast<S*>(chunk.exp_avg_sq),
                          static_cast<S*>(chunk.max_exp_avg_sq), chunk.master};
  const uint16_t* random[3] = {nullptr, nullptr, nullptr};
  const auto point_at = [&](int64_t i) {
    for (int draw = 0; draw < 3 && drawn != nullptr; ++draw) {
      random[draw] = reinterpret_cast<const uint16_t*>(drawn->words[draw]) + (i - begin);
    }
  };
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
    if constexpr (!kPlain) point_at(i);
    if (const int64_t ahead = chunk.prefetch_bytes; ahead > 0) {
      prefetch_pair(at.gradient + i, ahead);
      prefetch_pair(at.exp_avg + i, ahead);
      prefetch_pair(at.exp_avg_sq + i, ahead);
      prefetch_pair(at.parameter + i, ahead);
    }
    update_pair<kPlain, kOrder>(at, chunk, i, random, Two());
  }
  for (; i < end; i += kLanes) {
    if constexpr (!kPlain) point_at(i);
    const int64_t left = end - i < kLanes ? end - i : kLanes;
    update_pair<kPlain, Order::kConsecutive>(at, chunk, i, random, Some{left});
  }
}

template <class P, class S>
void update(const ChunkArguments& chunk) {
  constexpr bool kAllNarrow = __is_same(P, BFloat16) && __is_same(S, BFloat16);
  constexpr Order kOrder = kAllNarrow ? Order::kEvenOdd : Order::kConsecutive;
  if (chunk.max_exp_avg_sq == nullptr && chunk.master == nullptr && !chunk.is_stochastic) {
    return update_range<P, S, true, kOrder>(chunk, 0, chunk.count, nullptr);
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
    if (kAllNarrow && chunk.master == nullptr) {  // a master is fp32, whose elements are not apart so cheaply
      update_range<P, S, false, kOrder>(chunk, begin, end, bits);
    } else {
      update_range<P, S, false, Order::kConsecutive>(chunk, begin, end, bits);
    }
  }
}

}  // namespace

extern const ChunkKernels kChunkKernels = {{update<float, float>, update<float, BFloat16>, update<BFloat16, float>,
                                            update<BFloat16, BFloat16>, update<Float16, float>,
                                            update<Float16, Float16>}};

}  // namespace kernel_pytorch::adamw::KP_ISA_NAMESPACE
