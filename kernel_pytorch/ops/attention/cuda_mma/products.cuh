// Words of the kernels on mma: rows of a tensor into shared memory, products from there, results back out.
// Tiles in shared memory have rows of pitch_bytes.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/float_products.cuh"
#include "kernel_pytorch/ops/attention/cuda_mma/tile_cuda.h"

namespace kernel_pytorch::attention {

// Accumulators of 16 rows and kColumns columns, by groups of 8 columns: one flat fragment for the score policies.
template <int kColumns>
struct Accumulator {
  float values[kColumns / 2];
  __device__ __forceinline__ float (&group(int i))[4] { return *reinterpret_cast<float(*)[4]>(values + 4 * i); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
};

// Rows [0, rows) and columns [0, columns) of a tensor into a tile of kRows x kColumns, the rest zeros. Asynchronous
// where rows are vectors (kVectors); else complete for this thread on return.
template <class Element, int kRows, int kColumns, int kThreads, bool kVectors>
__device__ __forceinline__ void load_tile(uint32_t shared, const Element* source, int64_t row_stride, int32_t rows,
                                          int32_t columns, int thread = static_cast<int>(threadIdx.x)) {
  constexpr int kBytes = sizeof(Element), kWidth = 16 / kBytes, kChunks = kColumns / kWidth;
#pragma unroll(kIsFloat <Element> ? 1 : 4)
  for (int i = 0; i < (kRows * kChunks + kThreads - 1) / kThreads; ++i) {
    const int index = thread + i * kThreads;
    if (kRows * kChunks % kThreads != 0 && index >= kRows * kChunks) break;
    const int row = index / kChunks, column = index % kChunks * kWidth;
    const uint32_t target = shared + row * pitch_bytes(kColumns, kBytes) + column * kBytes;
    const bool is_inside = row < rows && column < columns;
    const Element* from = source + (is_inside ? row * row_stride + column : 0);
    if constexpr (kVectors) {
      ptx::cp_async_cg_shared_global_16_fill(target, from, is_inside ? 16 : 0);
    } else {
      uint32_t words[4] = {};
#pragma unroll 4
      for (int j = 0; j < kWidth; ++j) {
        if (!is_inside || column + j >= columns) continue;
        if constexpr (kIsFloat<Element>) {
          words[j] = __float_as_uint(from[j]);
        } else {
          words[j / 2] |= static_cast<uint32_t>(from[j].bits) << j % 2 * 16;
        }
      }
      ptx::st_shared_v4(target, {words[0], words[1], words[2], words[3]});
    }
  }
}

// sums[r] += A[r] B^T over kDepth columns: A of kBlocks times 16 rows, B of kColumns rows, both tiles in shared memory.
// kTf32: fp32 in one pass. Of fp32: attention/cuda_mma/float_products.cuh.
template <class Element, bool kTf32, int kBlocks, int kColumns, int kDepth>
requires(!kIsFloat<Element>) __device__ __forceinline__
    void multiply_by_transpose(Accumulator<kColumns> (&sums)[kBlocks], uint32_t a, uint32_t b) {
  constexpr int kPitch = pitch_bytes(kDepth, sizeof(Element));
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t a_lane = a + lane % 16 * kPitch + lane / 16 * 16;
  const uint32_t b_lane = b + (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::ldmatrix_x4(left[r], a_lane + r * 16 * kPitch + depth * 2);
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      uint32_t right[4];
      ptx::ldmatrix_x4(right, b_lane + column * kPitch + depth * 2);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        tile::multiply_fragments<Element>(sums[r].group(column / 8), left[r], right[0], right[1]);
        tile::multiply_fragments<Element>(sums[r].group(column / 8 + 1), left[r], right[2], right[3]);
      }
    }
  }
}

// sums[r] += A[r] B: A is what the accumulators of another product hold, rounded to Element; B is a tile of kDepth
// rows, of which kColumns columns are used.
template <class Element, bool kTf32, int kBlocks, int kColumns, int kDepth>
requires(!kIsFloat<Element>) __device__ __forceinline__
    void multiply_fragments(Accumulator<kColumns> (&sums)[kBlocks], const Accumulator<kDepth> (&a)[kBlocks], uint32_t b,
                            int pitch = pitch_bytes(kColumns, sizeof(Element))) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t b_lane = b + lane % 16 * pitch + lane / 16 * 16;
#pragma unroll
  for (int depth = 0; depth < kDepth; depth += 16) {
    uint32_t left[kBlocks][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[r][i] = tile::Word<Element>::pack(a[r].values + depth / 2 + 2 * i);
    }
#pragma unroll
    for (int column = 0; column < kColumns; column += 16) {
      uint32_t right[4];
      ptx::ldmatrix_x4_trans(right, b_lane + depth * pitch + column * 2);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        tile::multiply_fragments<Element>(sums[r].group(column / 8), left[r], right[0], right[1]);
        tile::multiply_fragments<Element>(sums[r].group(column / 8 + 1), left[r], right[2], right[3]);
      }
    }
  }
}

// A warp's 16 rows of results in 16 bits, times `factors` of the thread's two rows, by way of its own rows of shared
// memory, to rows [0, rows) and columns [0, columns) of a tensor.
template <class Element, int kColumns, bool kVectors>
__device__ __forceinline__ void store_rows(Element* target, int64_t row_stride, int32_t rows, int32_t columns,
                                           const Accumulator<kColumns>& sums, const float (&factors)[2], char* shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    const float pair[2] = {sums.values[i] * factors[i / 2 % 2], sums.values[i + 1] * factors[i / 2 % 2]};
    char* place = shared + tile::fragment_row(lane, i) * pitch_bytes(kColumns, 2) + tile::fragment_column(lane, i) * 2;
    *reinterpret_cast<uint32_t*>(place) = tile::Word<Element>::pack(pair);
  }
  __syncwarp();
  constexpr int kChunks = kColumns / 8;
  for (int index = lane; index < 16 * kChunks; index += 32) {
    const int row = index / kChunks, column = index % kChunks * 8;
    if (row >= rows || column >= columns) continue;
    const char* place = shared + row * pitch_bytes(kColumns, 2) + column * 2;
    Element* to = target + row * row_stride + column;
    if constexpr (kVectors) {
      ptx::st_global_v4(to, *reinterpret_cast<const ptx::Word4*>(place));
    } else {
      for (int j = 0; j < least(8, columns - column); ++j) to[j] = reinterpret_cast<const Element*>(place)[j];
    }
  }
  __syncwarp();
}

// The same as fp32, straight from the registers (four lanes fill a sector), added to `keep` times what is there; where
// that is 0 nothing is read.
template <int kColumns, bool kVectors>
__device__ __forceinline__ void store_float_rows(float* target, int64_t row_stride, int32_t rows, int32_t columns,
                                                 const Accumulator<kColumns>& sums, const float (&factors)[2],
                                                 const float (&keep)[2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    const int row = tile::fragment_row(lane, i), column = tile::fragment_column(lane, i), half = i / 2 % 2;
    if (row >= rows || column >= columns) continue;
    float* to = target + row * row_stride + column;
    float pair[2] = {sums.values[i] * factors[half], sums.values[i + 1] * factors[half]};
    if constexpr (kVectors) {
      uint64_t* both = reinterpret_cast<uint64_t*>(to);
      if (keep[half] != 0.0f) {
        const uint64_t there = *both;
        pair[0] += keep[half] * __uint_as_float(static_cast<uint32_t>(there));
        pair[1] += keep[half] * __uint_as_float(static_cast<uint32_t>(there >> 32));
      }
      *both = uint64_t{__float_as_uint(pair[1])} << 32 | __float_as_uint(pair[0]);
    } else {
      for (int j = 0; j < least(2, columns - column); ++j) {
        to[j] = keep[half] != 0.0f ? pair[j] + keep[half] * to[j] : pair[j];
      }
    }
  }
}

// The unit of block `index` of the launch and its tile there, in launch order or by the order of its lists.
struct UnitTile {
  int32_t unit, tile;
};
template <Features kFeatures>
__device__ __forceinline__ UnitTile unit_tile(const int32_t* places, int32_t index, int32_t tiles, bool last_first) {
  if constexpr (kFeatures.blocks && !kFeatures.packed) {
    if (places != nullptr) return {places[index] / tiles, places[index] % tiles};
  }
  return {index / tiles, last_first ? tiles - 1 - index % tiles : index % tiles};
}

// Where row `row` of a head begins.
template <Features kFeatures, class Element>
__device__ __forceinline__ Element* row_of(const RowTensor& tensor, int32_t batch, int32_t head, int64_t row) {
  return static_cast<Element*>(tensor.data) + (kFeatures.packed ? 0 : batch * tensor.batch) + head * tensor.head +
         row * tensor.row;
}

}  // namespace kernel_pytorch::attention
