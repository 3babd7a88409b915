// An optimizer's step in which the copy engine moves the chunks: a warp asks for them a ring of stages ahead and makes
// the factors, 256 threads compute in shared memory, in place, and one of them asks for the way back. Addresses are one
// thread's work, which leaves the others' issue slots to arithmetic. What the copy engine cannot take, the ends of
// parameters and tensors at odd addresses, the threads load and store themselves. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/ops/optimizer_step/cuda/step.cuh"
#include "kernel_pytorch/ops/optimizer_step/sm90/config_cuda.h"

namespace kernel_pytorch::optimizer_step::sm90 {

inline constexpr int kComputeBarrier = 1;  // of the threads that compute; 0 is __syncthreads'

// What the threads that compute must know about the chunk of a stage.
struct alignas(16) Stage {
  Factors factors;
  int place;
  int64_t begin;
  bool is_whole;  // the copy engine brings it
};

__device__ __forceinline__ Signals signals_of(const Arguments& arguments, float steps_taken) {
  Signals signals;
  signals.lr = arguments.lr_value != nullptr ? *arguments.lr_value : arguments.rates.lr;
  signals.grad_scale = arguments.grad_scale != nullptr ? *arguments.grad_scale : 1.0;
  signals.has_norm = arguments.total_norm != nullptr;
  signals.total_norm = signals.has_norm ? *arguments.total_norm : 0.0;
  signals.steps_taken = steps_taken;
  return signals;
}

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, Config kConfig>
struct Kernel {
  using OneStep = optimizer_step::Step<kRule, kStorage, P, S, kWeightBits, false>;
  static constexpr ChunkLayout kLayout =
      chunk_layout(kStorage, kWeightBits, sizeof(P), sizeof(S), OneStep::kHasSecond, kConfig.units);
  static constexpr int kElements = kLayout.elements;

  struct Shared {
    alignas(128) uint8_t ring[kConfig.stages][kLayout.bytes];
    Stage stages[kConfig.stages];
    tile::Barrier full[kConfig.stages], empty[kConfig.stages];
    Factors factors;
    Tables<kStorage> tables;
  };

  const Arguments& arguments;
  Shared& shared;

  // The chunks of this block: one stretch of the list, or every gridDim.x-th.
  __device__ __forceinline__ int chunks() const { return arguments.entries[arguments.count - 1].chunk_end; }
  __device__ __forceinline__ int first_chunk(int block) const {
    return static_cast<int>(static_cast<int64_t>(chunks()) * block / gridDim.x);
  }
  __device__ __forceinline__ int count() const {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    if constexpr (kConfig.sweeps) return (chunks() - block + blocks - 1) / blocks;
    return first_chunk(block + 1) - first_chunk(block);
  }
  __device__ __forceinline__ int chunk_at(int i) const {
    if constexpr (kConfig.sweeps) return static_cast<int>(blockIdx.x + i * gridDim.x);
    return first_chunk(static_cast<int>(blockIdx.x)) + i;
  }

  // Each tensor of a chunk: where it is in a stage, where in memory, how many bytes.
  template <class Visit>
  static __device__ __forceinline__ void for_each_read(const Entry& entry, int64_t begin, Visit visit) {
    const auto tensor = [&](const void* data, int offset, int element_bytes) {
      visit(offset, static_cast<const char*>(data) + begin * element_bytes, kElements * element_bytes);
    };
    if constexpr (!OneStep::kMaster) tensor(entry.parameter, kLayout.parameter, sizeof(P));
    tensor(entry.gradient, kLayout.gradient, sizeof(P));
    for_each_state(entry, begin, visit);
  }
  template <class Visit>
  static __device__ __forceinline__ void for_each_written(const Entry& entry, int64_t begin, Visit visit) {
    visit(kLayout.parameter, static_cast<const char*>(entry.parameter) + begin * static_cast<int>(sizeof(P)),
          kElements * static_cast<int>(sizeof(P)));
    for_each_state(entry, begin, visit);
  }
  template <class Visit>
  static __device__ __forceinline__ void for_each_state(const Entry& entry, int64_t begin, Visit visit) {
    const auto tensor = [&](const void* data, int offset, int element_bytes) {
      visit(offset, static_cast<const char*>(data) + begin * element_bytes, kElements * element_bytes);
    };
    if constexpr (OneStep::kCorrection) tensor(entry.weight_bits, kLayout.weight_bits, 1);
    if constexpr (OneStep::kMaster) tensor(entry.weight_bits, kLayout.weight_bits, 4);
    tensor(entry.first, kLayout.first, sizeof(S));
    if constexpr (OneStep::kHasSecond) tensor(entry.second, kLayout.second, sizeof(S));
    if constexpr (!OneStep::kIsPlain) {
      constexpr int kGroup = group_elements(kStorage);
      const auto scales = [&](const float* data, int offset) {
        visit(offset, reinterpret_cast<const char*>(data + begin / kGroup), kElements / kGroup * 4);
      };
      scales(entry.first_scale, kLayout.first_scale);
      if constexpr (OneStep::kHasSecond) scales(entry.second_scale, kLayout.second_scale);
    }
  }

  __device__ __forceinline__ void ask() {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunks_here = count();
    tile::PipelineState state;
    state.parity = 1;  // stages are empty at first
    float known_step = -1;
    int place = 0;
    for (int i = 0; i < chunks_here; ++i) {
      const int chunk = chunk_at(i);
      if (i == 0) {
        place = tensor_of_chunk(chunk, arguments.count, [&](int k) { return arguments.entries[k].chunk_end; });
      }
      bool is_new = i == 0;
      for (; arguments.entries[place].chunk_end <= chunk; ++place) is_new = true;
      const Entry& entry = arguments.entries[place];
      const int64_t begin =
          static_cast<int64_t>(chunk - (place == 0 ? 0 : arguments.entries[place - 1].chunk_end)) * kElements;
      const bool is_whole = entry.is_aligned && begin + kElements <= entry.elements;
      shared.empty[state.stage].wait(state.parity);
      Stage& stage = shared.stages[state.stage];
      if (is_whole && lane == 0) {
        const uint32_t to = ptx::shared_address(shared.ring[state.stage]);
        for_each_read(entry, begin, [&](int offset, const char* from, int bytes) {
          tile::copy_to_shared(to + offset, from, bytes, shared.full[state.stage]);
        });
      }
      if (is_new) {  // most parameters have taken the same steps
        const float steps_taken = *static_cast<const volatile float*>(entry.step);
        if (steps_taken != known_step) {
          if (lane < kFactorParts) {
            set_factors_part(shared.factors, lane, kRule, arguments.rates, signals_of(arguments, steps_taken));
          }
          known_step = steps_taken;
          __syncwarp();
        }
      }
      if (lane == 0) {
        stage.factors = shared.factors;
        stage.place = place;
        stage.begin = begin;
        stage.is_whole = is_whole;
        shared.full[state.stage].arrive_expect_bytes(is_whole ? kLayout.read_bytes : 0);
      }
      state.advance(kConfig.stages);
    }
    // Every step that this block needs is read.
    bool is_last = false;
    if (lane == 0) is_last = tile::arrives_last(arguments.arrived, gridDim.x);
    if (!__shfl_sync(0xffffffffu, is_last, 0)) return;
    for (int i = lane; i < arguments.count; i += 32) *arguments.entries[i].step += 1.0f;
  }

  __device__ __forceinline__ void compute() {
    shared.tables.fill();
    ptx::barrier_sync_aligned(kComputeBarrier, kThreads);
    const int chunks_here = count();
    const bool stores = threadIdx.x == 0;
    tile::PipelineState state;
    int stored_stage = -1;  // whose way back is under way
    for (int i = 0; i < chunks_here; ++i) {
      shared.full[state.stage].wait(state.parity);
      const Stage& stage = shared.stages[state.stage];
      const Entry& entry = arguments.entries[stage.place];
      const int64_t begin = stage.begin;
      const Factors factors = stage.factors;
      if (stage.is_whole) {
        uint8_t* const slot = shared.ring[state.stage];
        const Entry staged{.parameter = slot + kLayout.parameter,
                           .gradient = slot + kLayout.gradient,
                           .weight_bits = slot + kLayout.weight_bits,
                           .first = slot + kLayout.first,
                           .second = slot + kLayout.second,
                           .maximum = nullptr,
                           .first_scale = reinterpret_cast<float*>(slot + kLayout.first_scale),
                           .second_scale = reinterpret_cast<float*>(slot + kLayout.second_scale),
                           .step = nullptr,
                           .elements = kElements,
                           .random_block = 0,
                           .chunk_end = 0,
                           .is_aligned = true};
        const Random random{arguments.seed, entry.random_block + begin / kPhiloxElements};
        const OneStep one{staged, factors, shared.tables, random, true};
#pragma unroll
        for (int unit = 0; unit < kConfig.units; ++unit) {
          const int index = (unit * kThreads + static_cast<int>(threadIdx.x)) * OneStep::kCount;
          one.run(one.load_all(index), index);
        }
        ptx::fence_proxy_async_shared_cta();
        ptx::barrier_sync_aligned(kComputeBarrier, kThreads);
        if (stores) {
          const uint32_t from = ptx::shared_address(slot);
          for_each_written(entry, begin, [&](int offset, const char* to, int bytes) {
            ptx::cp_async_bulk_global_shared(const_cast<char*>(to), from + offset, bytes);
          });
          ptx::cp_async_bulk_commit_group();
        }
      } else {
        const OneStep one{entry, factors, shared.tables, {arguments.seed, entry.random_block}, false};
#pragma unroll 1
        for (int unit = 0; unit < kConfig.units; ++unit) {
          const int64_t index = begin + (unit * kThreads + static_cast<int>(threadIdx.x)) * OneStep::kCount;
          one.run(one.load_all(index), index);
        }
        ptx::barrier_sync_aligned(kComputeBarrier, kThreads);
        if (stores) ptx::cp_async_bulk_commit_group();
      }
      if (stores) {
        ptx::cp_async_bulk_wait_group_read<1>();
        if (stored_stage >= 0) shared.empty[stored_stage].arrive();
        stored_stage = state.stage;
      }
      state.advance(kConfig.stages);
    }
    if (stores) ptx::cp_async_bulk_wait_group<0>();
  }
};

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, Config kConfig>
__global__ void __launch_bounds__(kThreads + 32, kConfig.blocks) step(const __grid_constant__ Arguments arguments) {
  using Whole = Kernel<kRule, kStorage, P, S, kWeightBits, kConfig>;
  extern __shared__ __align__(128) uint8_t memory[];
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  auto& shared = *reinterpret_cast<typename Whole::Shared*>(memory);
  static_assert(sizeof(typename Whole::Shared) <= shared_bytes(Whole::kLayout, kStorage, kConfig));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kConfig.stages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(1);
    }
  }
  __syncthreads();
  Whole whole{arguments, shared};
  if (threadIdx.x >= kThreads) {
    whole.ask();
  } else {
    whole.compute();
  }
}

}  // namespace kernel_pytorch::optimizer_step::sm90
