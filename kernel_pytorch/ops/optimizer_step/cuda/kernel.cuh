// An optimizer's step for a list of parameters. A block takes a stretch of the list's chunks, and loads the next chunk
// before it computes the present one, so that memory never waits for arithmetic. Whichever block is last to have read
// its steps advances all steps, so that the count needs no launch of its own.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/cuda/step.cuh"

namespace kernel_pytorch::optimizer_step {

// Parts of the factors by threads of different warps, since each is a chain of slow operations in double.
__device__ __forceinline__ void set_factors(Factors& factors, Rule rule, const Arguments& arguments, float* step) {
  if (threadIdx.x % 32 != 0 || threadIdx.x >= 32 * kFactorParts) return;
  Signals signals;
  signals.lr = arguments.lr_value != nullptr ? *arguments.lr_value : arguments.rates.lr;
  signals.grad_scale = arguments.grad_scale != nullptr ? *arguments.grad_scale : 1.0;
  signals.has_norm = arguments.total_norm != nullptr;
  signals.total_norm = signals.has_norm ? *arguments.total_norm : 0.0;
  signals.steps_taken = *static_cast<const volatile float*>(step);
  set_factors_part(factors, threadIdx.x / 32, rule, arguments.rates, signals);
}

// A chunk of the list: kThreads units of one parameter.
template <int kChunkElements>
struct Walk {
  const Arguments& arguments;
  int chunk;
  int place;
  int64_t begin;
  bool is_whole;

  __device__ __forceinline__ Walk(const Arguments& arguments, int chunk) : arguments(arguments), chunk(chunk) {
    place = tensor_of_chunk(chunk, arguments.count, [&](int i) { return arguments.entries[i].chunk_end; });
    locate();
  }
  __device__ __forceinline__ void advance() {
    ++chunk;
    while (place + 1 < arguments.count && arguments.entries[place].chunk_end <= chunk) ++place;
    locate();
  }

 private:
  __device__ __forceinline__ void locate() {
    const Entry& entry = arguments.entries[place];
    const int first_chunk = place == 0 ? 0 : arguments.entries[place - 1].chunk_end;
    begin = static_cast<int64_t>(chunk - first_chunk) * kChunkElements;
    is_whole = entry.is_aligned && begin + kChunkElements <= entry.elements;
  }
};

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, bool kMaximum, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) step(const __grid_constant__ Arguments arguments) {
  using OneStep = Step<kRule, kStorage, P, S, kWeightBits, kMaximum>;
  __shared__ Factors factors;
  __shared__ Tables<kStorage> tables;
  __shared__ bool is_last;
  uint32_t ticket = 0;
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  tables.fill();
  const int64_t chunks = arguments.entries[arguments.count - 1].chunk_end;
  const int first_chunk = static_cast<int>(chunks * blockIdx.x / gridDim.x);
  const int end_chunk = static_cast<int>(chunks * (blockIdx.x + 1) / gridDim.x);
  if (first_chunk < end_chunk) {
    const int offset = threadIdx.x * OneStep::kCount;
    const auto step_of = [&](int place, bool is_whole) {
      const Entry& entry = arguments.entries[place];
      return OneStep{entry, factors, tables, {arguments.seed, entry.random_block}, is_whole};
    };
    Walk<kThreads * OneStep::kCount> walk(arguments, first_chunk);
    typename OneStep::Loaded next;
    if (walk.is_whole) next = step_of(walk.place, true).load_all(walk.begin + offset);
    int factors_place = -1;
    while (walk.chunk < end_chunk) {
      const typename OneStep::Loaded loaded = next;
      const int place = walk.place;
      const int64_t index = walk.begin + offset;
      const bool is_whole = walk.is_whole;
      walk.advance();
      if (walk.chunk < end_chunk && walk.is_whole) next = step_of(walk.place, true).load_all(walk.begin + offset);
      if (place != factors_place) {
        __syncthreads();
        set_factors(factors, kRule, arguments, arguments.entries[place].step);
        __syncthreads();
        factors_place = place;
        // The last steps that this block reads; the ticket is not needed before the end.
        if (threadIdx.x == 0 && arguments.entries[place].chunk_end >= end_chunk) {
          __threadfence();
          ticket = atomicAdd(arguments.arrived, 1u);
        }
      }
      if (is_whole) {
        step_of(place, true).run(loaded, index);
      } else {
        const OneStep one = step_of(place, false);
        one.run(one.load_all(index), index);
      }
    }
  }
  if (threadIdx.x == 0) is_last = ticket == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < arguments.count; i += kThreads) *arguments.entries[i].step += 1.0f;
}

// The same with blocks that take one chunk of kUnits units a thread, and leave: all loads are on their way before the
// factors are made. Where memory alone is the limit, blocks that begin and end in the order of addresses use it better.
template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, bool kMaximum, int kBlocks,
          int kUnits>
__global__ void __launch_bounds__(kThreads, kBlocks) step_once(const __grid_constant__ Arguments arguments) {
  using OneStep = Step<kRule, kStorage, P, S, kWeightBits, kMaximum>;
  constexpr int kUnitElements = kThreads * OneStep::kCount;
  __shared__ Factors factors;
  __shared__ Tables<kStorage> tables;
  __shared__ bool is_last;
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  const int chunk = static_cast<int>(blockIdx.x);
  const Walk<kUnitElements * kUnits> walk(arguments, chunk);
  const Entry& entry = arguments.entries[walk.place];
  uint32_t ticket = 0;
  const auto prepare = [&] {
    tables.fill();
    set_factors(factors, kRule, arguments, entry.step);
    __syncthreads();
    if (threadIdx.x == 0) {  // the ticket is not needed before the end
      __threadfence();
      ticket = atomicAdd(arguments.arrived, 1u);
    }
  };
  const int64_t first = walk.begin + threadIdx.x * OneStep::kCount;
  if (walk.is_whole) {
    const OneStep whole{entry, factors, tables, {arguments.seed, entry.random_block}, true};
    typename OneStep::Loaded loaded[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) loaded[i] = whole.load_all(first + i * kUnitElements);
    prepare();
#pragma unroll
    for (int i = 0; i < kUnits; ++i) whole.run(loaded[i], first + i * kUnitElements);
  } else {
    prepare();
    const OneStep part{entry, factors, tables, {arguments.seed, entry.random_block}, false};
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) part.run(part.load_all(first + i * kUnitElements), first + i * kUnitElements);
  }
  if (threadIdx.x == 0) is_last = ticket == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < arguments.count; i += kThreads) *arguments.entries[i].step += 1.0f;
}

}  // namespace kernel_pytorch::optimizer_step
