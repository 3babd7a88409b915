// A matrix product of FP8 codes by mma.m16n8k32, for the tensor cores of 8.9 and newer: blocks of 128 x 128, a ring of
// stages that each thread fills by cp.async. Both operands are dense in k and their rows begin at multiples of 16
// bytes. Two codes of a row move and multiply as one 16-bit element of other types does. On 8.9 and 12.x the
// instruction is the hardware's; for 9.0 and 10.0 the assembler makes two products of fp16 of it, and conversions.
// sm_89.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/float8_mma.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/mma_block.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh"

namespace kernel_pytorch::tile {

// Neighbouring codes of both operands.
template <class A, class B>
struct CodePairs {};

#define KP_MULTIPLY_CODES(A, B, INSTRUCTION)                                                                 \
  template <>                                                                                                \
  __device__ __forceinline__ void multiply_fragments<CodePairs<A, B>>(float(&sum)[4], const uint32_t(&a)[4], \
                                                                      uint32_t b0, uint32_t b1) {            \
    ptx::INSTRUCTION(sum, a, b0, b1);                                                                        \
  }
KP_MULTIPLY_CODES(Float8E4M3, Float8E4M3, mma_m16n8k32_f32_e4m3_e4m3)
KP_MULTIPLY_CODES(Float8E4M3, Float8E5M2, mma_m16n8k32_f32_e4m3_e5m2)
KP_MULTIPLY_CODES(Float8E5M2, Float8E4M3, mma_m16n8k32_f32_e5m2_e4m3)
KP_MULTIPLY_CODES(Float8E5M2, Float8E5M2, mma_m16n8k32_f32_e5m2_e5m2)
#undef KP_MULTIPLY_CODES

}  // namespace kernel_pytorch::tile

namespace kernel_pytorch::product {

// A stage is [128][64] codes. Rows are 16 bytes longer than what they hold, so that eight of them lie in different
// banks.
class Float8Operand {
  static constexpr int kVectors = kFloat8Depth / 16;  // of a row

 public:
  using Layout = tile::StageLayout<false, kFloat8Depth + 16>;

  __device__ __forceinline__ Float8Operand(const TileOperand& operand, int32_t first, int32_t rows, int32_t depth)
      : data_(static_cast<const unsigned char*>(operand.data)),
        stride_(operand.outer),
        first_(first),
        rows_(rows),
        depth_(depth) {}

  __device__ __forceinline__ void load(uint32_t target, int32_t k) const {
#pragma unroll
    for (int i = 0; i < kMmaEdge * kVectors / kTileThreads; ++i) {
      const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kTileThreads;
      const int32_t line = index / kVectors, within = index % kVectors * 16;
      const int32_t row = first_ + line, at = k + within;
      const int32_t bytes = row < rows_ ? min(max(depth_ - at, 0), 16) : 0;
      const unsigned char* source = bytes > 0 ? data_ + row * stride_ + at : data_;
      ptx::cp_async_cg_shared_global_16_fill(target + line * Layout::kPitch + within, source,
                                             static_cast<uint32_t>(bytes));
    }
  }

 private:
  const unsigned char* data_;
  int64_t stride_;
  int32_t first_, rows_, depth_;
};

// kPromotes: sums leave the tensor cores' accumulators every 128 of k, where they meet the scales of their block;
// otherwise scales do not change along k and wait for the end.
template <class A, class B, bool kPromotes>
__global__ void __launch_bounds__(kTileThreads, 1) float8_product(const __grid_constant__ TileArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Layout = Float8Operand::Layout;
  using Block = tile::MmaBlock<tile::CodePairs<A, B>, Layout, Layout>;
  const uint32_t stages = ptx::shared_address(memory);
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kMmaEdge;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kMmaEdge;
  const Float8Operand a(arguments.a, first_row, arguments.m, arguments.k);
  const Float8Operand b(arguments.b, first_column, arguments.n, arguments.k);
  const int32_t steps = (arguments.k + kFloat8Depth - 1) / kFloat8Depth;
  const auto load = [&](int32_t step) {
    if (step < steps) {
      const uint32_t target = stages + step % kFloat8Stages * 2 * kFloat8OperandBytes;
      a.load(target, step * kFloat8Depth);
      b.load(target + kFloat8OperandBytes, step * kFloat8Depth);
    }
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kFloat8Stages - 1; ++i) load(i);
  Block sums, part;
  const auto promote = [&](int32_t block) {
    sums.add_scaled(
        part, [&](int row) { return scale_at(arguments.scale_a, min(first_row + row, arguments.m - 1), block); },
        [&](int column) { return scale_at(arguments.scale_b, min(first_column + column, arguments.n - 1), block); });
  };
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kFloat8Stages - 2>();
    __syncthreads();
    load(step + kFloat8Stages - 1);  // into the stage that all warps have read
    const uint32_t stage = stages + step % kFloat8Stages * 2 * kFloat8OperandBytes;
// Unrolled, two sets of sums would spill on 10.0, whose compiler makes fp16 of the codes first.
#pragma unroll(kPromotes ? 1 : 2)
    for (int pair = 0; pair < kFloat8Depth / 2; pair += 16) part.add(stage, stage + kFloat8OperandBytes, pair);
    if constexpr (kPromotes) {
      constexpr int kSteps = kTileScaleBlock / kFloat8Depth;
      if ((step + 1) % kSteps == 0 || step + 1 == steps) promote(step / kSteps);
    }
  }
  ptx::cp_async_wait_group<0>();
  if constexpr (!kPromotes) promote(0);
  auto& finished = *reinterpret_cast<float(*)[kTileRowsAtOnce][kMmaEdge]>(memory);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    __syncthreads();
    sums.store(finished, half);
    __syncthreads();
    finish_rows(arguments, finished, first_row + half * kTileRowsAtOnce, first_column);
  }
}

}  // namespace kernel_pytorch::product
