// A matrix product of fp32 by mma.m16n8k8 of tf32, which reads 11 bits of an operand's 24: blocks of kEdge x kEdge,
// eight warps, a ring of stages that each thread fills by cp.async. Rows (or columns, as they lie) begin at multiples
// of 16 bytes. sm_80.
//
// Each operand is split in registers into big + small, and small * big + big * small + big * big is right to fp32's
// rounding: what is left out is 2^-22 of a product. Of a, big is rounded to nearest, so that small, and what is left
// out, has either sign; b is cut off. kOnce: big * big of both rounded, which is what precision tf32 says.
//
// Tensor cores cut a sum off instead of rounding it, so that long sums drift towards zero: sums of kStretch terms are
// kept by themselves and added to the whole's by rounded additions.
//
// An element that is infinite, or rounds to infinity, has a small part of the opposite sign or none, and gives NaN. A
// block that finds a NaN or an infinity in its sums (large parts rounded up can overflow) computes them again, with
// products of finite numbers apart from the others.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/mma.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh"

namespace kernel_pytorch::product {

__device__ __forceinline__ uint32_t cut_to_tf32(uint32_t word) {
  return word & 0xffffe000u;
}
__device__ __forceinline__ bool is_finite_word(uint32_t word) {
  return (word & 0x7f800000u) != 0x7f800000u;
}
// A NaN that stays one without its lower bits.
__device__ __forceinline__ uint32_t with_lasting_nan(uint32_t word) {
  return (word & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : word;
}

// A stage of one operand: [kEdge][depth] where k is dense, else [depth][kEdge] (kAcross). The padding of a line puts
// eight lines (of [depth][kEdge] four, with eight elements each) into different banks.
template <int kEdge, bool kAcross>
class FloatOperand {
  static constexpr int kLine = kAcross ? kEdge : kFloatDepth;
  static constexpr int kPitch = kLine * 4 + (kAcross ? 32 : 16);
  static constexpr int kVectors = kLine / 4;

 public:
  __device__ __forceinline__ FloatOperand(const TileOperand& operand, int32_t first, int32_t rows, int32_t depth)
      : data_(static_cast<const float*>(operand.data) + blockIdx.z * operand.batch),
        stride_(kAcross ? operand.inner : operand.outer),
        first_(first),
        rows_(rows),
        depth_(depth) {}

  __device__ __forceinline__ void load(uint32_t target, int32_t k) const {
#pragma unroll
    for (int i = 0; i < kEdge * kFloatDepth / 4 / kTileThreads; ++i) {
      const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kTileThreads;
      const int32_t line = index / kVectors, within = index % kVectors * 4;
      const int32_t outer = kAcross ? k + line : first_ + line, inner = kAcross ? first_ + within : k + within;
      const int32_t outer_end = kAcross ? depth_ : rows_, inner_end = kAcross ? rows_ : depth_;
      const int32_t bytes = outer < outer_end ? min(max(inner_end - inner, 0), 4) * 4 : 0;
      const float* source = bytes > 0 ? data_ + outer * stride_ + inner : data_;
      ptx::cp_async_cg_shared_global_16_fill(target + line * kPitch + within * 4, source, static_cast<uint32_t>(bytes));
    }
  }

  // The sum of a row of the stage.
  static __device__ __forceinline__ float sum_of_row(const unsigned char* stage, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kFloatDepth; ++k) {
      const int offset = kAcross ? k * kPitch + row * 4 : row * kPitch + k * 4;
      sum += *reinterpret_cast<const float*>(stage + offset);
    }
    return sum;
  }

  // Sixteen rows by eight of k, as mma takes them of the first operand, or (kColumnsOfB) two groups of eight columns as
  // it takes them of the second. Four floats are a row of ldmatrix.
  template <bool kColumnsOfB>
  static __device__ __forceinline__ void fragment(uint32_t (&words)[4], uint32_t stage, int row, int k) {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kAcross) {
      const uint32_t address = stage + (k + lane % 4) * kPitch + (row + lane / 4) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int high_row = kColumnsOfB ? i / 2 : i % 2, high_k = kColumnsOfB ? i % 2 : i / 2;
        words[i] = __float_as_uint(ptx::ld_shared_f32(address + 4 * high_k * kPitch + 8 * high_row * 4));
      }
    } else {
      const uint32_t matrix = lane / 8;
      const uint32_t high_row = kColumnsOfB ? matrix / 2 : matrix % 2, high_k = kColumnsOfB ? matrix % 2 : matrix / 2;
      ptx::ldmatrix_x4(words, stage + (row + 8 * high_row + lane % 8) * kPitch + (k + 4 * high_k) * 4);
    }
  }

 private:
  const float* data_;
  int64_t stride_;
  int32_t first_, rows_, depth_;
};

enum class FloatWay { kThrice, kOnce, kCareful };

template <int kEdge, bool kAcrossA, bool kAcrossB, bool kOnce>
class FloatProduct {
  static constexpr int kBlocks = kEdge / 32, kGroups = kEdge / 32;  // of 16 rows and 8 columns: two by four warps
  static constexpr int kStages = kFloatStages, kOperandBytes = float_operand_bytes(kEdge);
  using OperandA = FloatOperand<kEdge, kAcrossA>;
  using OperandB = FloatOperand<kEdge, kAcrossB>;
  using Sums = float[kBlocks][kGroups][4];

 public:
  __device__ __forceinline__ FloatProduct(const TileArguments& arguments, unsigned char* memory)
      : arguments_(arguments), memory_(memory), stages_(ptx::shared_address(memory)) {}

  __device__ __forceinline__ void run() const {
    Sums sums = {};
    multiply<kOnce ? FloatWay::kOnce : FloatWay::kThrice>(sums);
    if constexpr (!kOnce) {
      bool is_finite = true;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int r = 0; r < 4; ++r) is_finite &= (__float_as_uint(sums[i][j][r]) & 0x7f800000u) != 0x7f800000u;
        }
      }
      if (__syncthreads_or(!is_finite)) {
#pragma unroll
        for (int i = 0; i < kBlocks * kGroups * 4; ++i) sums[i / 4 / kGroups][i / 4 % kGroups][i % 4] = 0.0f;
        multiply<FloatWay::kCareful>(sums);
      }
    }
    finish(sums);
  }

 private:
  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x / 32) / 4 * (kEdge / 2);
  }
  static __device__ __forceinline__ int warp_column() {
    return static_cast<int>(threadIdx.x / 32) % 4 * (kEdge / 4);
  }
  __device__ __forceinline__ int32_t first_row() const {
    return static_cast<int32_t>(blockIdx.y) * kEdge;
  }
  __device__ __forceinline__ int32_t first_column() const {
    return static_cast<int32_t>(blockIdx.x) * kEdge;
  }

  template <FloatWay kWay>
  __device__ __forceinline__ void multiply(Sums& sums) const {
    const OperandA a(arguments_.a, first_row(), arguments_.m, arguments_.k);
    const OperandB b(arguments_.b, first_column(), arguments_.n, arguments_.k);
    const int32_t steps = (arguments_.k + kFloatDepth - 1) / kFloatDepth;
    const auto load = [&](int32_t step) {
      if (step < steps) {
        const uint32_t target = stages_ + step % kStages * 2 * kOperandBytes;
        a.load(target, step * kFloatDepth);
        b.load(target + kOperandBytes, step * kFloatDepth);
      }
      ptx::cp_async_commit_group();
    };
    for (int i = 0; i < kStages - 1; ++i) load(i);
    // Of a as it is: with the first run of the loop alone.
    const int thread = static_cast<int>(threadIdx.x);
    const bool sums_rows =
        kWay != FloatWay::kCareful && arguments_.row_sums.data != nullptr && blockIdx.x == 0 && thread < kEdge;
    float row_sum = 0.0f;
    Sums part = {};
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      ptx::cp_async_wait_group<kStages - 2>();
      __syncthreads();
      load(step + kStages - 1);  // into the stage that all warps have read
      const int32_t offset = step % kStages * 2 * kOperandBytes;
      const uint32_t stage = stages_ + offset;
      if (sums_rows) row_sum += OperandA::sum_of_row(memory_ + offset, thread);
#pragma unroll
      for (int k = 0; k < kFloatDepth; k += 8) add<kWay>(kWay == FloatWay::kOnce ? sums : part, stage, k);
      if (kWay != FloatWay::kOnce && ((step + 1) % (kFloatStretch / kFloatDepth) == 0 || step + 1 == steps)) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              sums[i][j][r] += part[i][j][r];
              part[i][j][r] = 0.0f;
            }
          }
        }
      }
    }
    ptx::cp_async_wait_group<0>();
    if (sums_rows && first_row() + thread < arguments_.m) {
      store_any(arguments_.row_sums, blockIdx.z * arguments_.row_sums.batch + first_row() + thread, row_sum);
    }
    __syncthreads();  // before the memory is used for something else
  }

  // Eight terms more.
  template <FloatWay kWay>
  static __device__ __forceinline__ void add(Sums& sums, uint32_t stage, int k) {
    uint32_t of_b[kGroups / 2][4], small_b[kGroups / 2][4];
#pragma unroll
    for (int j = 0; j < kGroups / 2; ++j) {
      OperandB::template fragment<true>(of_b[j], stage + kOperandBytes, warp_column() + 16 * j, k);
      split<kWay, false>(of_b[j], small_b[j]);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t of_a[4], small_a[4];
      OperandA::template fragment<false>(of_a, stage, warp_row() + 16 * i, k);
      split<kWay, true>(of_a, small_a);
      if constexpr (kWay != FloatWay::kOnce) {
        multiply_block<kWay>(sums[i], small_a, of_b);
        multiply_block<kWay>(sums[i], of_a, small_b);
      }
      multiply_block<FloatWay::kThrice>(sums[i], of_a, of_b);
    }
  }

  // In the careful way numbers that are not finite have no part in the small products.
  template <FloatWay kWay>
  static __device__ __forceinline__ void multiply_block(float (&sums)[kGroups][4], const uint32_t (&a)[4],
                                                        const uint32_t (&b)[kGroups / 2][4]) {
    uint32_t left[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = kWay != FloatWay::kCareful || is_finite_word(a[i]) ? a[i] : 0u;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      uint32_t right[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
#pragma unroll
      for (int i = 0; i < 2; ++i) right[i] = kWay != FloatWay::kCareful || is_finite_word(right[i]) ? right[i] : 0u;
      ptx::mma_m16n8k8_f32_tf32(sums[j], left, right[0], right[1]);
    }
  }

  template <FloatWay kWay, bool kRounds>
  static __device__ __forceinline__ void split(uint32_t (&big)[4], uint32_t (&small)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = big[i];
      if constexpr (kWay == FloatWay::kOnce) {
        big[i] = rounded_for_tf32(word);
        continue;
      }
      if constexpr (kRounds && kWay == FloatWay::kThrice) big[i] = word + 0x1000u;
      if constexpr (kWay == FloatWay::kCareful) big[i] = with_lasting_nan(word);
      const uint32_t rest = __float_as_uint(__uint_as_float(word) - __uint_as_float(cut_to_tf32(big[i])));
      small[i] = kWay == FloatWay::kThrice || is_finite_word(word) ? rest : 0u;
    }
  }

  __device__ __forceinline__ void finish(const Sums& sums) const {
    auto& finished = *reinterpret_cast<float(*)[kTileRowsAtOnce][kEdge]>(memory_);
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int first = 0; first < kEdge; first += kTileRowsAtOnce) {
      __syncthreads();
      if (warp_row() / kTileRowsAtOnce * kTileRowsAtOnce == first) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              finished[warp_row() % kTileRowsAtOnce + 16 * i + lane / 4 + r / 2 * 8]
                      [warp_column() + 8 * j + lane % 4 * 2 + r % 2] = sums[i][j][r];
            }
          }
        }
      }
      __syncthreads();
      finish_rows(arguments_, finished, first_row() + first, first_column());
    }
  }

  const TileArguments& arguments_;
  unsigned char* memory_;
  uint32_t stages_;
};

template <int kEdge, bool kAcrossA, bool kAcrossB, bool kOnce>
__global__ void __launch_bounds__(kTileThreads, kEdge == 128 ? 1 : 2)
    float_product(const __grid_constant__ TileArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  if (arguments.only_if != nullptr && *arguments.only_if == 0) return;
  FloatProduct<kEdge, kAcrossA, kAcrossB, kOnce>(arguments, memory).run();
}

}  // namespace kernel_pytorch::product
