// Units on their way to registers through shared memory. A thread copies what it will read itself (cp.async), so that
// nothing waits for other threads, and chunks that are under way take no registers.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/units.cuh"

namespace kernel_pytorch::optimizer_step {

// A place for one unit of each thread and stage.
template <bool kUsed, class AnyUnit, int kStages, int kTag = 0>
struct Slots {
  static constexpr int kBytes = AnyUnit::kWords * 4, kAccess = AnyUnit::kAccess, kPieces = kBytes / kAccess;
  Words<kAccess> pieces[kStages][kPieces][kThreads];

  __device__ __forceinline__ void fetch(int stage, const void* tensor, Place place) {
    constexpr uint32_t kElementBytes = kBytes / AnyUnit::kElements;
    const char* from = static_cast<const char*>(tensor) + place.begin * kElementBytes + place.offset * kElementBytes;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t to = ptx::shared_address(&pieces[stage][i][threadIdx.x]);
      if constexpr (kAccess == 16) ptx::cp_async_cg_shared_global_16(to, from + i * 16);
      if constexpr (kAccess == 8) ptx::cp_async_ca_shared_global_8_fill(to, from, 8);
      if constexpr (kAccess == 4) ptx::cp_async_ca_shared_global_4(to, from);
    }
  }
  __device__ __forceinline__ void take(AnyUnit& unit, int stage) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Words<kAccess> piece = pieces[stage][i][threadIdx.x];
#pragma unroll
      for (int k = 0; k < kAccess / 4; ++k) unit.words[i * (kAccess / 4) + k] = piece.words[k];
    }
  }
};
template <class AnyUnit, int kStages, int kTag>
struct Slots<false, AnyUnit, kStages, kTag> {
  __device__ __forceinline__ void fetch(int, const void*, Place) {}
  __device__ __forceinline__ void take(AnyUnit&, int) const {}
};

// What a step loads of a chunk, in kStages stages.
template <class OneStep, int kStages>
struct Staging {
  using Loaded = typename OneStep::Loaded;
  static constexpr bool kCoded = !OneStep::kIsPlain;
  [[no_unique_address]] Slots<!OneStep::kMaster, decltype(Loaded::parameter), kStages, 1> parameter;
  Slots<true, decltype(Loaded::gradient), kStages> gradient;
  [[no_unique_address]] Slots<OneStep::kCorrection, decltype(Loaded::correction), kStages, 2> correction;
  [[no_unique_address]] Slots<OneStep::kMaster, decltype(Loaded::master), kStages, 3> master;
  Slots<true, decltype(Loaded::first), kStages> first;
  [[no_unique_address]] Slots<OneStep::kHasSecond, decltype(Loaded::second), kStages, 4> second;
  [[no_unique_address]] Slots<OneStep::kHasMaximum, decltype(Loaded::maximum), kStages, 5> maximum;
  [[no_unique_address]] Slots<kCoded, Unit<float, 1>, kStages, 6> first_scale;
  [[no_unique_address]] Slots<kCoded && OneStep::kHasSecond, Unit<float, 1>, kStages, 7> second_scale;

  __device__ __forceinline__ void fetch(int stage, const OneStep& step, Place place) {
    const Entry& entry = step.entry;
    const Place group{place.begin / OneStep::kGroup, place.offset / OneStep::kGroup};
    parameter.fetch(stage, entry.parameter, place);
    gradient.fetch(stage, entry.gradient, place);
    correction.fetch(stage, entry.weight_bits, place);
    master.fetch(stage, entry.weight_bits, place);
    if (step.has_first()) first.fetch(stage, entry.first, place);
    second.fetch(stage, entry.second, place);
    maximum.fetch(stage, entry.maximum, place);
    first_scale.fetch(stage, entry.first_scale, group);
    second_scale.fetch(stage, entry.second_scale, group);
  }
  __device__ __forceinline__ Loaded take(int stage) const {
    Loaded loaded;
    Unit<float, 1> scales[2] = {{{0}}, {{0}}};
    parameter.take(loaded.parameter, stage);
    gradient.take(loaded.gradient, stage);
    correction.take(loaded.correction, stage);
    master.take(loaded.master, stage);
    first.take(loaded.first, stage);
    second.take(loaded.second, stage);
    maximum.take(loaded.maximum, stage);
    first_scale.take(scales[0], stage);
    second_scale.take(scales[1], stage);
    loaded.first_scale = __uint_as_float(scales[0].words[0]);
    loaded.second_scale = __uint_as_float(scales[1].words[0]);
    return loaded;
  }
};

}  // namespace kernel_pytorch::optimizer_step
