// A ring of stages in shared memory for the weight, of one block of threads: codes of kRows rows and kSpans blocks of
// k, which the copy engine brings, and their scales and zeros, which the lanes of one warp copy. Loads by lanes would
// spend a cycle of the first cache on each row of a load (eight for 512 bytes), and as many on a few bytes of scales:
// that, not decoding, bounds a kernel whose lanes fetch for themselves. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/weight.cuh"

namespace kernel_pytorch::quantized_matmul {

// Codes lie as the copy engine writes boxes of kBox bytes of rows, swizzled; the row behind lane / 4 is such that eight
// lanes of a load of 16 bytes meet different banks.
template <Format kFormat, int kRows, int kSpans, int kBox>
class WeightStage {
  static constexpr WeightStageLayout kLayout = stage_layout(kFormat, kRows, kSpans);
  static constexpr int kScaleBytes = group_format::is_integer(kFormat) ? 2 : 1;
  static constexpr int kBoxSpans = kBox / kSpanBytes;
  static_assert(kSpans % kBoxSpans == 0);

 public:
  static constexpr int kBytes = kLayout.bytes, kScalePitch = kLayout.scale_pitch;

  // The row of the weight, of eight, that a lane has in fragments.
  static __device__ __forceinline__ int32_t row_of(int32_t lane) {
    const int32_t line = lane / 4;
    return kBox == 128 ? line / 2 + line % 2 * 4 : line;
  }

  // ---- for one warp ----

  // Rows from first_row on and blocks of k from `span` on into the stage at `target`; completes on the barrier, which
  // counts kFullArrivals.
  static constexpr int kFullArrivals = 33;
  static __device__ __forceinline__ void fetch(const WeightArguments& weight, const tile::TensorMap& codes,
                                               uint32_t target, uint32_t barrier, int32_t first_row, int32_t rows,
                                               int32_t span) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(barrier, kRows * kSpans * kSpanBytes);
#pragma unroll
      for (int i = 0; i < kSpans / kBoxSpans; ++i) {
        ptx::cp_async_bulk_tensor_3d_shared_global(target + i * kRows * kBox, &codes, span * kSpanBytes + i * kBox,
                                                   first_row, 0, barrier);
      }
    }
    copy_window<kLayout.scale_pitch>(weight.scales, kScaleBytes, weight, target + kLayout.scales_at, first_row, rows, span,
                                     weight.scale_piece);
    if (group_format::is_integer(kFormat) && weight.zeros != nullptr) {
      copy_window<kLayout.zero_pitch>(weight.zeros, 1, weight, target + kLayout.zeros_at, first_row, rows, span,
                                      weight.zero_piece);
    }
    ptx::cp_async_mbarrier_arrive_noinc(barrier);
  }

  // ---- for lanes that decode ----

  static __device__ __forceinline__ ptx::Word4 codes(uint32_t stage, int32_t row, int32_t span, int32_t lane) {
    const int32_t unit = span % kBoxSpans * 4 + lane % 4, line = row_of(lane);
    const int32_t swizzle = kBox == 128 ? line : line / 2 % 4;
    return ptx::ld_shared_v4(stage + (span / kBoxSpans * kRows + row + line) * kBox + (unit ^ swizzle) * 16);
  }
  // Where the scale of the group lies that column k of a row has: `row` counts from the stage's first, which is a
  // multiple of four, and `stage_span` is the stage's first block of k.
  static __device__ __forceinline__ uint32_t scale_address(const WeightArguments& weight, uint32_t stage, int32_t row,
                                                           int32_t stage_span, int32_t k) {
    return stage + kLayout.scales_at + row * kLayout.scale_pitch +
           place(weight.scales, kScaleBytes, weight, row, stage_span, k);
  }
  static __device__ __forceinline__ uint32_t zero_address(const WeightArguments& weight, uint32_t stage, int32_t row,
                                                          int32_t stage_span, int32_t k) {
    return stage + kLayout.zeros_at + row * kLayout.zero_pitch + place(weight.zeros, 1, weight, row, stage_span, k);
  }
  // Chunks of rows row + row_of(lane) + 8 i, from column k on, which is the lane's own in block number `span` of the
  // stage.
  template <class T, int kChunks>
  static __device__ __forceinline__ void take(const WeightArguments& weight, uint32_t stage, int32_t row,
                                              int32_t stage_span, int32_t span, WeightChunk<T, kFormat> (&chunks)[kChunks]) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), line = row + row_of(lane);
    const int32_t k = (stage_span + span) * kSpan + lane % 4 * (kSpan / 4);
    const uint32_t scale = scale_address(weight, stage, line, stage_span, k);
    int32_t zeros[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) zeros[i] = group_format::middle_code(kFormat);
    if (group_format::is_integer(kFormat) && weight.zeros != nullptr) {
      const uint32_t zero = zero_address(weight, stage, line, stage_span, k);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        zeros[i] = static_cast<int32_t>(ptx::ld_shared_u8(zero + 8 * i * kLayout.zero_pitch));
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t address = scale + 8 * i * kLayout.scale_pitch;
      const uint32_t bytes = kFormat == Format::kMxfp4 ? ptx::ld_shared_u8(address) : ptx::ld_shared_u16(address);
      chunks[i].set(codes(stage, row + 8 * i, span, lane), bytes, zeros[i]);
    }
  }

 private:
  static constexpr int kSpan = span_of(kFormat);

  static __device__ __forceinline__ int32_t first_group_of(const WeightArguments& weight, int32_t span) {
    return span * kSpan >> weight.group_shift;
  }
  // Of four bytes: rows and blocks of k need not begin at multiples of them.
  static __device__ __forceinline__ uint32_t place(const void* data, int32_t bytes, const WeightArguments& weight,
                                                   int32_t row, int32_t stage_span, int32_t k) {
    const int32_t first = first_group_of(weight, stage_span);
    const uint32_t start = static_cast<uint32_t>(reinterpret_cast<uint64_t>(data)) +
                           static_cast<uint32_t>(row * weight.groups + first) * bytes;
    return (start & 3) + ((k >> weight.group_shift) - first) * bytes;
  }
  // Pieces of 4, 8 or 16 bytes of each row's window, zeros behind the row's end.
  template <int kPitch>
  static __device__ __forceinline__ void copy_window(const void* data, int32_t bytes, const WeightArguments& weight,
                                                     uint32_t target, int32_t first_row, int32_t rows, int32_t span,
                                                     int32_t piece) {
    const int32_t first = first_group_of(weight, span);
    const int32_t groups = (((span + kSpans) * kSpan - 1) >> weight.group_shift) + 1 - first;
    const int32_t shift = 31 - __clz(piece);
    const int32_t pieces = (groups * bytes + (piece == 4 ? 3 : 0) + piece - 1) >> shift;
    for (int32_t index = static_cast<int32_t>(threadIdx.x % 32); index < kRows * pieces; index += 32) {
      const int32_t row = index / pieces, i = index - row * pieces;
      const uint64_t line = reinterpret_cast<uint64_t>(data) + static_cast<int64_t>(first_row + row) * weight.groups * bytes;
      const uint64_t source = ((line + first * bytes) & ~uint64_t{3}) + (i << shift);
      const int64_t left = static_cast<int64_t>(line + weight.groups * bytes - source);
      const uint32_t wanted = first_row + row < rows && left > 0 ? static_cast<uint32_t>(min(left, int64_t{piece})) : 0u;
      const uint32_t place = target + row * kPitch + (i << shift);
      const void* address = wanted > 0 ? reinterpret_cast<const void*>(source) : weight.codes;
      if (piece == 16) {
        ptx::cp_async_cg_shared_global_16_fill(place, address, wanted);
      } else if (piece == 8) {
        ptx::cp_async_ca_shared_global_8_fill(place, address, wanted);
      } else {
        ptx::cp_async_ca_shared_global_4_fill(place, address, wanted);
      }
    }
  }
};

}  // namespace kernel_pytorch::quantized_matmul
