// How blocks of threads divide the steps of all tiles evenly: some of the first tile's, whole tiles, some of the last
// one's. Where a tile is of several blocks the last one to come adds their sums in the order of their k. sm_80.
#pragma once

#include "kernel_pytorch/ops/quantized_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantized_matmul {

struct StepWalk {
  int32_t tile, step, end;  // end: of the steps of this tile
  int32_t left;

  __device__ __forceinline__ StepWalk(const WalkArguments& arguments, int32_t block) {
    const int32_t first = block * arguments.steps_each;
    left = min(arguments.steps_each, arguments.tiles * arguments.steps - first);
    tile = first / arguments.steps;
    step = first % arguments.steps;
    enter(arguments);
  }
  __device__ __forceinline__ bool has_tile() const { return left > 0; }
  __device__ __forceinline__ bool is_whole(const WalkArguments& arguments) const {
    return end - step == arguments.steps;
  }
  __device__ __forceinline__ void advance(const WalkArguments& arguments) {
    left -= end - step;
    ++tile;
    step = 0;
    enter(arguments);
  }

 private:
  __device__ __forceinline__ void enter(const WalkArguments& arguments) { end = min(arguments.steps, step + left); }
};

// The blocks that a tile is of.
struct TileBlocks {
  int32_t first, count;

  __device__ __forceinline__ TileBlocks(const WalkArguments& arguments, int32_t tile) {
    const int32_t first_step = tile * arguments.steps;
    first = first_step / arguments.steps_each;
    count = (first_step + arguments.steps - 1) / arguments.steps_each - first + 1;
  }
};

}  // namespace kernel_pytorch::quantized_matmul
