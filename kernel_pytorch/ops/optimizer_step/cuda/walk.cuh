// Which parts of the list a block takes.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"

namespace kernel_pytorch::optimizer_step {

// kThreads units of one parameter.
struct Chunk {
  int place;  // of the parameter; below 0: there is none
  bool is_whole;
  int64_t begin;
};

// The chunks of a block: one stretch of the list, so that most of them are of one parameter.
template <int kChunkElements>
struct Walk {
  const Arguments& arguments;
  int chunk, end, place;

  __device__ __forceinline__ explicit Walk(const Arguments& arguments) : arguments(arguments) {
    const int64_t chunks = arguments.entries[arguments.count - 1].chunk_end;
    chunk = static_cast<int>(chunks * blockIdx.x / gridDim.x);
    end = static_cast<int>(chunks * (blockIdx.x + 1) / gridDim.x);
    place = tensor_of_chunk(chunk, arguments.count, [&](int i) { return arguments.entries[i].chunk_end; });
  }
  __device__ __forceinline__ Chunk next() {
    if (chunk >= end) return {-1, false, 0};
    while (arguments.entries[place].chunk_end <= chunk) ++place;
    const Entry& entry = arguments.entries[place];
    const int first_chunk = place == 0 ? 0 : arguments.entries[place - 1].chunk_end;
    const int64_t begin = static_cast<int64_t>(chunk++ - first_chunk) * kChunkElements;
    return {place, entry.is_aligned && begin + kChunkElements <= entry.elements, begin};
  }
};

}  // namespace kernel_pytorch::optimizer_step
