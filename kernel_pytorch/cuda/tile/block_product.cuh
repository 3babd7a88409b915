// A block's product of 128 x 128 of 16-bit operands in shared memory, by the matrix instructions that a GPU has: here
// mma. AMD's GPUs are given hip/tile/block_product.cuh under this name.
#pragma once

#include "kernel_pytorch/cuda/tile/mma_block.cuh"

namespace kernel_pytorch::tile {

template <class T, class LayoutA, class LayoutB>
using BlockProduct = MmaBlock<T, LayoutA, LayoutB>;

}  // namespace kernel_pytorch::tile
