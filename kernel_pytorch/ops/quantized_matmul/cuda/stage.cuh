// A ring of stages in shared memory for the weight, of one block of threads: codes of kRows rows and kSpans blocks of
// k, which the copy engine brings, and their scales and zeros, which the lanes of one warp copy by cp.async. Loads by
// lanes would spend a cycle of the first cache on each row of a load (eight for 512 bytes), and as many on a few bytes
// of scales: that, not decoding, bounds a kernel whose lanes fetch for themselves. sm_90.
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
  static constexpr int kSpan = span_of(kFormat);

  // Windows begin at multiples of four bytes: rows do, blocks of k need not.
  static __device__ __forceinline__ uint32_t place(int32_t bytes, const WeightArguments& weight, int32_t stage_span,
                                                   int32_t k) {
    const int32_t first = stage_span * kSpan >> weight.group_shift;
    return (first * bytes & 3) + ((k >> weight.group_shift) - first) * bytes;
  }

  // The windows of a matrix of scales or zeros. A lane has the same piece of rows that lie a fixed distance apart, so
  // that a copy is an addition and the instruction: one warp has as many cycles as there are for a stage.
  class WindowCopy {
   public:
    __device__ __forceinline__ WindowCopy(const void* data, int32_t bytes, const WeightArguments& weight, int32_t piece)
        : data_(static_cast<const uint8_t*>(data)),
          bytes_(bytes),
          group_shift_(weight.group_shift),
          piece_(piece),
          row_bytes_(weight.groups * bytes) {
      const int32_t groups = max(kSpans * kSpan >> group_shift_, 1);
      const int32_t pieces = max(groups * bytes / piece, 1);  // a power of two
      lane_rows_ = 32 / pieces;
      const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
      row_ = lane / pieces;
      offset_ = lane % pieces * piece;
    }
    __device__ __forceinline__ bool is_used() const { return group_format::is_integer(kFormat) && data_ != nullptr; }
    __device__ __forceinline__ void point_at(int32_t first_row, int32_t rows) {
      line_ = data_ + static_cast<int64_t>(first_row + row_) * row_bytes_;
      rows_left_ = rows - first_row - row_;
    }
    template <int kPitch>
    __device__ __forceinline__ void copy(uint32_t target, int32_t span) const {
      const int32_t at = ((span * kSpan >> group_shift_) * bytes_ & ~3) + offset_;
      const int32_t wanted = min(max(row_bytes_ - at, 0), piece_);  // zeros behind a row's end
      if (piece_ == 16) {
        copy_rows<kPitch>(target, at, [&](uint32_t to, const void* from, bool is_inside) {
          ptx::cp_async_cg_shared_global_16_fill(to, from, is_inside ? wanted : 0);
        });
      } else if (piece_ == 8) {
        copy_rows<kPitch>(target, at, [&](uint32_t to, const void* from, bool is_inside) {
          ptx::cp_async_ca_shared_global_8_fill(to, from, is_inside ? wanted : 0);
        });
      } else {
        copy_rows<kPitch>(target, at, [&](uint32_t to, const void* from, bool is_inside) {
          ptx::cp_async_ca_shared_global_4_fill(to, from, is_inside ? wanted : 0);
        });
      }
    }

   private:
    template <int kPitch, class Copy>
    __device__ __forceinline__ void copy_rows(uint32_t target, int32_t at, const Copy& copy) const {
      const bool is_behind = at >= row_bytes_;  // of the row's end
      const uint8_t* from = is_behind ? data_ : line_ + at;
      uint32_t to = target + row_ * kPitch + offset_;
      const int32_t step = is_behind ? 0 : lane_rows_ * row_bytes_;
      int32_t left = rows_left_;
#pragma unroll 4
      for (int32_t row = row_; row < kRows; row += lane_rows_) {
        copy(to, left > 0 ? from : data_, left > 0);
        from += step;
        to += lane_rows_ * kPitch;
        left -= lane_rows_;
      }
    }

    const uint8_t* data_;
    int32_t bytes_, group_shift_, piece_, row_bytes_;
    int32_t lane_rows_, row_, offset_, rows_left_ = 0;
    const uint8_t* line_ = nullptr;
  };

 public:
  static constexpr int kBytes = kLayout.bytes, kScalePitch = kLayout.scale_pitch;

  // The row of the weight, of eight, that a lane has in fragments.
  static __device__ __forceinline__ int32_t row_of(int32_t lane) {
    const int32_t line = lane / 4;
    return kBox == 128 ? line / 2 + line % 2 * 4 : line;
  }

  static constexpr int kFullArrivals = 33;  // of a stage's barrier

  // One warp that fills stages.
  class Producer {
   public:
    __device__ __forceinline__ Producer(const WeightArguments& weight, const tile::TensorMap& codes)
        : codes_(codes),
          scales_(weight.scales, kScaleBytes, weight, weight.scale_piece),
          zeros_(weight.zeros, 1, weight, weight.zero_piece) {}

    // What is fetched next: rows from first_row on.
    __device__ __forceinline__ void point_at(int32_t first_row, int32_t rows) {
      row_ = first_row;
      scales_.point_at(first_row, rows);
      if (zeros_.is_used()) zeros_.point_at(first_row, rows);
    }
    // Blocks of k from `span` on into the stage at `target`; completes on the barrier.
    __device__ __forceinline__ void fetch(uint32_t target, uint32_t barrier, int32_t span) {
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive_expect_tx(barrier, kRows * kSpans * kSpanBytes);
#pragma unroll
        for (int i = 0; i < kSpans / kBoxSpans; ++i) {
          ptx::cp_async_bulk_tensor_3d_shared_global(target + i * kRows * kBox, &codes_, span * kSpanBytes + i * kBox,
                                                     row_, 0, barrier);
        }
      }
      scales_.template copy<kLayout.scale_pitch>(target + kLayout.scales_at, span);
      if (zeros_.is_used()) zeros_.template copy<kLayout.zero_pitch>(target + kLayout.zeros_at, span);
      ptx::cp_async_mbarrier_arrive_noinc(barrier);
    }

   private:
    const tile::TensorMap& codes_;
    WindowCopy scales_, zeros_;
    int32_t row_ = 0;
  };

  // ---- for lanes that decode ----

  static __device__ __forceinline__ ptx::Word4 codes(uint32_t stage, int32_t row, int32_t span, int32_t lane) {
    const int32_t unit = span % kBoxSpans * 4 + lane % 4, line = row_of(lane);
    const int32_t swizzle = kBox == 128 ? line : line / 2 % 4;
    return ptx::ld_shared_v4(stage + (span / kBoxSpans * kRows + row + line) * kBox + (unit ^ swizzle) * 16);
  }
  // Where the scale of the group lies that column k of a row has: `row` counts from the stage's first,
  // and `stage_span` is the stage's first block of k.
  static __device__ __forceinline__ uint32_t scale_address(const WeightArguments& weight, uint32_t stage, int32_t row,
                                                           int32_t stage_span, int32_t k) {
    return stage + kLayout.scales_at + row * kLayout.scale_pitch + place(kScaleBytes, weight, stage_span, k);
  }
  static __device__ __forceinline__ uint32_t zero_address(const WeightArguments& weight, uint32_t stage, int32_t row,
                                                          int32_t stage_span, int32_t k) {
    return stage + kLayout.zeros_at + row * kLayout.zero_pitch + place(1, weight, stage_span, k);
  }
  // Chunks of rows row + row_of(lane) + 8 i, from column k on, which is the lane's own in block number `span` of the
  // stage.
  template <class T, int kChunks>
  static __device__ __forceinline__ void take(const WeightArguments& weight, uint32_t stage, int32_t row,
                                              int32_t stage_span, int32_t span,
                                              WeightChunk<T, kFormat> (&chunks)[kChunks]) {
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
};

}  // namespace kernel_pytorch::quantized_matmul
