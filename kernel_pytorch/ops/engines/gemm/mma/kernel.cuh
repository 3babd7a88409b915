// A matrix product of 16-bit types by mma.m16n8k16 (AMD: MFMA), for tensor cores before and after Hopper's: blocks of
// 128 x 128, a ring of stages that each thread fills by cp.async, every order of the operands. Rows (or columns, as
// they lie) begin at multiples of 16 bytes. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/block_product.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh"

namespace kernel_pytorch::product {

// A stage of one operand: [128][32] where k is dense, else [32][128] (kAcross). Rows are 16 bytes longer than what they
// hold, so that eight of them lie in different banks.
// With kGathers line i of the operand is line gather[i] of memory, where an index is given.
template <class T, bool kAcross, bool kGathers = false>
class MmaOperand {
  static constexpr int kPitch = (kAcross ? kMmaEdge : kMmaDepth) * 2 + 16;
  static constexpr int kVectors = (kAcross ? kMmaEdge : kMmaDepth) / 8;  // of a row

 public:
  using Layout = tile::StageLayout<kAcross, kPitch>;
  __device__ __forceinline__ MmaOperand(const TileOperand& operand, int32_t first, int32_t rows, int32_t depth,
                                        const int32_t* gather = nullptr)
      : data_(static_cast<const T*>(operand.data) + blockIdx.z * operand.batch),
        stride_(kAcross ? operand.inner : operand.outer),
        first_(first),
        rows_(rows),
        depth_(depth),
        gather_(gather) {}

  __device__ __forceinline__ void load(uint32_t target, int32_t k) const {
#pragma unroll
    for (int i = 0; i < kMmaEdge * kMmaDepth / 8 / kTileThreads; ++i) {
      const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kTileThreads;
      const int32_t line = index / kVectors, within = index % kVectors * 8;
      const int32_t outer = kAcross ? k + line : first_ + line, inner = kAcross ? first_ + within : k + within;
      const int32_t outer_end = kAcross ? depth_ : rows_, inner_end = kAcross ? rows_ : depth_;
      const int32_t bytes = outer < outer_end ? min(max((inner_end - inner) * 2, 0), 16) : 0;
      const T* source = bytes > 0 ? data_ + memory_line(outer) * stride_ + inner : data_;
      ptx::cp_async_cg_shared_global_16_fill(target + line * kPitch + within * 2, source, static_cast<uint32_t>(bytes));
    }
  }

 private:
  __device__ __forceinline__ int64_t memory_line(int32_t line) const {
    if constexpr (kGathers) return gather_ == nullptr ? line : gather_[line];
    return line;
  }

  const T* data_;
  int64_t stride_;
  int32_t first_, rows_, depth_;
  const int32_t* gather_;
};

// One tile of a product. The gathers are of a's and of b's lines, null where those are as they lie.
template <class T, bool kAcrossA, bool kAcrossB, bool kGathers>
__device__ __forceinline__ void mma_tile(const TileArguments& arguments, int32_t first_row, int32_t first_column,
                                         unsigned char* memory, const int32_t* gather_a, const int32_t* gather_b) {
  const uint32_t stages = ptx::shared_address(memory);
  using OperandA = MmaOperand<T, kAcrossA, kGathers>;
  using OperandB = MmaOperand<T, kAcrossB, kGathers>;
  const OperandA a(arguments.a, first_row, arguments.m, arguments.k, gather_a);
  const OperandB b(arguments.b, first_column, arguments.n, arguments.k, gather_b);
  const int32_t steps = (arguments.k + kMmaDepth - 1) / kMmaDepth;
  const auto load = [&](int32_t step) {
    if (step < steps) {
      const uint32_t target = stages + step % kMmaStages * 2 * kMmaOperandBytes;
      a.load(target, step * kMmaDepth);
      b.load(target + kMmaOperandBytes, step * kMmaDepth);
    }
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kMmaStages - 1; ++i) load(i);
  tile::BlockProduct<T, typename OperandA::Layout, typename OperandB::Layout> product;
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kMmaStages - 2>();
    __syncthreads();
    load(step + kMmaStages - 1);  // into the stage that all warps have read
    const uint32_t stage_a = stages + step % kMmaStages * 2 * kMmaOperandBytes, stage_b = stage_a + kMmaOperandBytes;
#pragma unroll
    for (int k = 0; k < kMmaDepth; k += 16) product.add(stage_a, stage_b, k);
  }
  ptx::cp_async_wait_group<0>();
  auto& finished = *reinterpret_cast<float(*)[kTileRowsAtOnce][kMmaEdge]>(memory);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    __syncthreads();
    product.store(finished, half);
    __syncthreads();
    finish_rows(arguments, finished, first_row + half * kTileRowsAtOnce, first_column);
  }
}

template <class T, bool kAcrossA, bool kAcrossB>
__global__ void __launch_bounds__(kTileThreads, 2) mma_product(const __grid_constant__ TileArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  mma_tile<T, kAcrossA, kAcrossB, false>(arguments, static_cast<int32_t>(blockIdx.y) * kMmaEdge,
                                         static_cast<int32_t>(blockIdx.x) * kMmaEdge, memory, nullptr, nullptr);
}

}  // namespace kernel_pytorch::product
