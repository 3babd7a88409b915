// A step of AdamW on the lanes of the CPU, built once per instruction level: every tensor is read and written once, in
// step with the others. The plain step has a loop of its own; what amsgrad, masters and random bits add is decided per
// vector, where memory's time hides it.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/adamw/adamw_chunk.h"
#include "kernel_pytorch/ops/adamw/adamw_draws_cuda.h"

namespace kernel_pytorch::adamw::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

struct AllLanes {};
struct SomeLanes {
  int64_t count;
};
template <class T>
KP_WORD Vec load(const T* from, AllLanes) {
  return cpu::load(from);
}
template <class T>
KP_WORD Vec load(const T* from, SomeLanes lanes) {
  return cpu::load_partial(from, lanes.count);
}
template <class T>
KP_WORD void store(T* to, Vec value, AllLanes) {
  cpu::store(to, value);
}
template <class T>
KP_WORD void store(T* to, Vec value, SomeLanes lanes) {
  cpu::store_partial(to, value, lanes.count);
}

// Random bits of so many elements are drawn at a time: whole rounds of philox_blocks at every level.
constexpr int64_t kDrawnElements = 512;
struct Drawn {
  alignas(64) uint32_t words[3][kDrawnElements / 2];

  KP_WORD void draw(Drawn& drawn, const ChunkArguments& chunk, int64_t begin, Draw draw) {
    const uint64_t block = draw_block(chunk.block + static_cast<uint64_t>(begin / 8), draw);
    for (int64_t i = 0; i < kDrawnElements / 8; i += kLanes) {
      cpu::philox_blocks(chunk.seed, chunk.offset, block + static_cast<uint64_t>(i),
                         drawn.words[static_cast<int>(draw)] + 4 * i);
    }
  }
};

// Rounds up with the probability that the lower half tells, where T is bf16 and bits were drawn.
template <class T, class Lanes>
KP_WORD void store_rounded(T* to, Vec value, const uint16_t* random, Lanes lanes) {
  if constexpr (__is_same(T, BFloat16)) {
    if (random != nullptr) {
      const cpu::VecU bits = cpu::bits_of(value);
      const cpu::VecU drawn = cpu::widen_bits(cpu::load_storage<cpu::VecU16>(random));
      value = cpu::from_bits(cpu::select(cpu::is_nan(value), bits, (bits + drawn) & 0xffff0000u));
    }
  }
  store(to, value, lanes);  // exact where it was rounded above
}

template <class P, class S, bool kPlain>
struct Pointers {
  P* parameter;
  const P* gradient;
  S* exp_avg;
  S* exp_avg_sq;
  S* max_exp_avg_sq;
  float* master;
};

template <class P, class S, bool kPlain, class Lanes>
KP_WORD void update_vector(const Pointers<P, S, kPlain>& at, const ChunkArguments& chunk, int64_t i,
                           const uint16_t* const (&random)[3], Lanes lanes) {
  const Vec gradient = load(at.gradient + i, lanes) * chunk.gradient_factor;
  Vec first = load(at.exp_avg + i, lanes);
  first += (gradient - first) * chunk.first;
  const Vec second = load(at.exp_avg_sq + i, lanes) * chunk.beta2 + gradient * gradient * chunk.second;
  Vec largest = second;
  if (!kPlain && at.max_exp_avg_sq != nullptr) {
    const Vec before = load(at.max_exp_avg_sq + i, lanes);
    largest = cpu::select((second > before) | cpu::is_nan(second), second, before);
  }
  const bool has_master = !kPlain && at.master != nullptr;
  const Vec before = has_master ? load(at.master + i, lanes) : load(at.parameter + i, lanes);
  const Vec after = before * chunk.keep - first * chunk.step_size / (cpu::sqrt(largest) * chunk.root + chunk.eps);
  store_rounded(at.exp_avg + i, first, kPlain ? nullptr : random[1], lanes);
  store_rounded(at.exp_avg_sq + i, second, kPlain ? nullptr : random[2], lanes);
  if (!kPlain && at.max_exp_avg_sq != nullptr) store_rounded(at.max_exp_avg_sq + i, largest, random[2], lanes);
  if (has_master) store(at.master + i, after, lanes);
  store_rounded(at.parameter + i, after, kPlain ? nullptr : random[0], lanes);
}

template <class P, class S, bool kPlain>
KP_WORD void update_range(const ChunkArguments& chunk, int64_t begin, int64_t end, const Drawn* drawn) {
  const Pointers<P, S, kPlain> at{static_cast<P*>(chunk.parameter),      static_cast<const P*>(chunk.gradient),
                                  static_cast<S*>(chunk.exp_avg),        static_cast<S*>(chunk.exp_avg_sq),
                                  static_cast<S*>(chunk.max_exp_avg_sq), chunk.master};
  const uint16_t* random[3] = {nullptr, nullptr, nullptr};
  const auto point_at = [&](int64_t i) {
    for (int draw = 0; draw < 3 && drawn != nullptr; ++draw) {
      random[draw] = reinterpret_cast<const uint16_t*>(drawn->words[draw]) + (i - begin);
    }
  };
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    if constexpr (!kPlain) point_at(i);
    update_vector<P, S, kPlain>(at, chunk, i, random, AllLanes());
  }
  if (i == end) return;
  if constexpr (!kPlain) point_at(i);
  update_vector<P, S, kPlain>(at, chunk, i, random, SomeLanes{end - i});
}

template <class P, class S>
void update(const ChunkArguments& chunk) {
  if (chunk.max_exp_avg_sq == nullptr && chunk.master == nullptr && !chunk.is_stochastic) {
    return update_range<P, S, true>(chunk, 0, chunk.count, nullptr);
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
    update_range<P, S, false>(chunk, begin, end, chunk.is_stochastic ? &drawn : nullptr);
  }
}

}  // namespace

extern const ChunkKernels kChunkKernels = {{update<float, float>, update<float, BFloat16>, update<BFloat16, float>,
                                            update<BFloat16, BFloat16>, update<Float16, float>,
                                            update<Float16, Float16>}};

}  // namespace kernel_pytorch::adamw::KP_ISA_NAMESPACE
