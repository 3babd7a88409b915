// Which chunks there are. Those of a packed sequence i begin at slot begin / 64 + i: no two sequences share one, and
// the host needs no offsets to know that tokens / 64 + sequences are enough.
#pragma once

#include "kernel_pytorch/ops/linear_attention/cuda/sequence.cuh"
#include "kernel_pytorch/ops/linear_attention/delta/sm90/chunk_cuda.h"

namespace kernel_pytorch::linear_attention::delta {

template <class Arguments>
__device__ __forceinline__ int64_t first_slot(const Arguments& arguments, int64_t sequence, const Span& span) {
  return arguments.offsets == nullptr ? sequence * arguments.chunks : span.begin / kChunkTokens + sequence;
}

// The tokens of a slot's chunk; count 0: it has none.
struct ChunkPlace {
  int64_t batch, first;
  int count;
  bool begins;  // the sequence
};
template <class Arguments>
__device__ __forceinline__ ChunkPlace place_of_slot(const Arguments& arguments, int64_t slot) {
  int64_t sequence = 0;
  if (arguments.offsets == nullptr) {
    sequence = slot / arguments.chunks;
  } else {
    int64_t behind = arguments.sequences;  // the last sequence whose first slot is at most this one
    while (behind - sequence > 1) {
      const int64_t middle = (sequence + behind) / 2;
      if (first_slot(arguments, middle, span_of(arguments, middle)) <= slot) {
        sequence = middle;
      } else {
        behind = middle;
      }
    }
  }
  const Span span = span_of(arguments, sequence);
  const int64_t first = span.begin + (slot - first_slot(arguments, sequence, span)) * kChunkTokens;
  const int64_t left = first < span.begin ? 0 : span.end - first;
  return {span.batch, first,
          static_cast<int>(left < 0              ? 0
                           : left < kChunkTokens ? left
                                                 : kChunkTokens),
          first == span.begin};
}

}  // namespace kernel_pytorch::linear_attention::delta
