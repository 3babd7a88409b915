// Lists of blocks on the GPU. A warp makes one list: it reads 32 entries of the map at a time, and a vote tells every
// lane where its own goes. Rows and columns of the map differ in their steps alone.
#pragma once

#include "kernel_pytorch/ops/block_list/arguments_cuda.h"

namespace kernel_pytorch::block_list {

// A list that a warp writes: all lanes call.
class ListWriter {
 public:
  __device__ __forceinline__ explicit ListWriter(int32_t* blocks) : blocks_(blocks) {}

  __device__ __forceinline__ void add(bool wanted, int32_t index) {
    const uint32_t votes = __ballot_sync(0xffffffffu, wanted);
    const uint32_t below = (1u << (threadIdx.x % 32)) - 1;
    if (wanted && blocks_ != nullptr) blocks_[count_ + __popc(votes & below)] = index;
    count_ += __popc(votes);
  }

  __device__ __forceinline__ void finish(int32_t* count, int32_t length) const {
    if (blocks_ == nullptr) return;
#pragma unroll 1
    for (int32_t i = count_ + threadIdx.x % 32; i < length; i += 32) blocks_[i] = 0;
    if (threadIdx.x % 32 == 0) *count = count_;
  }

 private:
  int32_t* blocks_;
  int32_t count_ = 0;
};

__global__ void __launch_bounds__(kThreads) build(const __grid_constant__ BuildArguments arguments) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (warp >= arguments.row_lists + arguments.column_lists) return;
  const bool by_row = warp < arguments.row_lists;
  const Side& side = by_row ? arguments.rows : arguments.columns;
  const int64_t list = by_row ? warp : warp - arguments.row_lists;
  const int64_t head = list / side.lists;
  const uint8_t* from = arguments.map + head * arguments.head_step + (list - head * side.lists) * side.list_step;
  const int64_t place = list * side.length;
  ListWriter partial(side.blocks == nullptr ? nullptr : side.blocks + place);
  ListWriter full(side.full_blocks == nullptr ? nullptr : side.full_blocks + place);
#pragma unroll 4
  for (int32_t begin = 0; begin < side.length; begin += 32) {
    const int32_t i = begin + threadIdx.x % 32;
    const uint8_t state = i < side.length ? from[i * side.step] : kEmpty;
    partial.add(state == kPartial, i);
    full.add(state == kFull, i);
  }
  partial.finish(side.counts + list, side.length);
  full.finish(side.full_counts + list, side.length);
}

}  // namespace kernel_pytorch::block_list
