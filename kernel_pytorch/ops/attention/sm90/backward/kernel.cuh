// The main kernel of attention's backward on sm_90: a block keeps 128 keys and values and walks the queries that see
// them.
//
// Two warpgroups compute S^T = K Q^T, P, dP^T = V dO^T, dS, dV += P^T dO and dK += dS^T Q for 64 keys each, P and dS
// staying in registers; they never wait for one another. A third takes dS through shared memory and adds dQ = dS K to
// global sums, straight from its registers. One thread of a fourth brings the tiles in, its other warps zero sums for
// blocks to come. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/keys.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/queries.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/wide.cuh"

namespace kernel_pytorch::attention {

// Registers per thread; a block of 512 threads starts with 128 each. What the assembler needs besides accumulators and
// operands decides: 64 are enough for 32 accumulators, 56 are not.
inline constexpr int kLoaderRegisters = 32;
template <BackwardTile kTile>
inline constexpr int kReducerRegisters = kTile.sum_columns == 32   ? 48
                                         : kTile.sum_columns == 64 ? 64
                                                                   : 96;
template <BackwardTile kTile>
inline constexpr int kKeyRegisters = (4 * 128 - kLoaderRegisters - kReducerRegisters<kTile>) / 16 * 8;

// Result: of the gradients of keys and values; T, or float.
template <class T, class Result, Features kFeatures, BackwardTile kTile>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_keys(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char shared[];
  using Shared = BackwardShared<kTile>;
  BackwardBarriers<kTile> barriers(shared + Shared::kBarriers);
  // In shared memory, since registers are what the roles below lack.
  BackwardWork& work = *reinterpret_cast<BackwardWork*>(shared + Shared::kWork);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  // A block may wait only for blocks that were launched before it: in turns the last keys come first.
  const int block = static_cast<int>(kTile.in_turns ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  if (threadIdx.x < 32) {
    // What is read here is older than the kernel before this one.
    begin_block<kFeatures, kTile>(arguments, work, block, shared, barriers);
  }
  tile::wait_for_earlier_kernels();
  __syncthreads();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x < 32 && work.steps > 0) {
      load_tiles<kFeatures, kTile>(arguments, work, shared, barriers);
    } else if (threadIdx.x == 0 && work.first_key < work.head.keys) {
      barriers.key->wait(0);  // the block's memory is the copies' until they are done
      barriers.value->wait(0);
    }
    if (threadIdx.x >= 32) zero_sums_ahead<kTile>(arguments, block);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<kReducerRegisters<kTile>>();
    if (work.steps > 0) add_query_gradients<T, kFeatures, kTile>(arguments, work, shared, barriers);
  } else {
    ptx::setmaxnreg_inc<kKeyRegisters<kTile>>();
    if (work.steps == 0) {
      zero_key_gradients<Result>(arguments, work, static_cast<int>(threadIdx.x) - 256);
    } else if constexpr (kTile.keys == 128) {
      key_gradients<T, Result, kFeatures, kTile>(arguments, work, shared, barriers, warpgroup - 2);
    } else if (warpgroup == 2) {
      wide_probabilities<T, Result, kFeatures, kTile>(arguments, work, shared, barriers);
    } else {
      wide_differences<T, Result, kFeatures, kTile>(arguments, work, shared, barriers);
    }
  }
}

}  // namespace kernel_pytorch::attention
