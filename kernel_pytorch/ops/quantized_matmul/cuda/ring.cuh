// A lane's own ring in shared memory for what it decodes: 16 bytes of codes of rows that lie eight apart, with their
// scales and zeros, brought by cp.async several stages ahead. No other lane reads it, so that nothing but the lane's
// own copies has to be waited for. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/weight.cuh"

namespace kernel_pytorch::quantized_matmul {

template <class T, Format kFormat, int kChunks, int kStages>
class WeightRing {
  static constexpr int kScaleBytes = group_format::is_integer(kFormat) ? 2 : 1;
  static constexpr bool kHasZeros = group_format::is_integer(kFormat);
  static constexpr int kStageBytes = 32 * ring_lane_bytes(kFormat, kChunks);

 public:
  using Chunk = WeightChunk<T, kFormat>;

  // `ring` is the warp's shared memory.
  __device__ __forceinline__ WeightRing(const WeightArguments& weight, uint32_t ring, int32_t lane)
      : weight_(weight), ring_(ring + lane * 16), lane_(lane), group_shift_(31 - __clz(weight.group)) {
    // Rows are multiples of eight apart, so that where in four bytes a scale lies depends on the lane and k.
    const uint32_t line = lane / 4 * weight.groups;
    scale_at_ = static_cast<uint32_t>(reinterpret_cast<uint64_t>(weight.scales)) + line * kScaleBytes;
    zero_at_ = static_cast<uint32_t>(reinterpret_cast<uint64_t>(weight.zeros)) + line;
  }

  // What is fetched next: rows first_row + lane / 4 + 8 i from the lane's k on. first_row is a multiple of eight.
  __device__ __forceinline__ void point_at(int32_t first_row, int32_t rows, int32_t k) {
    const int32_t row = first_row + lane_ / 4;
    rows_left_ = rows - row;
    k_ = k;
    codes_ = weight_.codes + row * weight_.code_stride + k / group_format::codes_in_byte(kFormat);
    groups_before_ = static_cast<int64_t>(row) * weight_.groups;
  }

  // The next block of k; zeros outside.
  __device__ __forceinline__ void fetch(int stage, int32_t k_end) {
    const uint32_t target = ring_ + stage * kStageBytes, words = target + kChunks * 512 - lane_ * 12;
    const int64_t at = groups_before_ + (k_ >> group_shift_);
    uint64_t scales = (reinterpret_cast<uint64_t>(weight_.scales) + at * kScaleBytes) & ~uint64_t{3};
    const uint8_t* codes = codes_;
    const int32_t rows_left = k_ < k_end ? rows_left_ : 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool is_inside = 8 * i < rows_left;  // nothing is read elsewhere
      ptx::cp_async_cg_shared_global_16_fill(target + i * 512, codes, is_inside ? 16 : 0);
      ptx::cp_async_ca_shared_global_4_fill(words + i * 128, reinterpret_cast<const void*>(scales), is_inside ? 4 : 0);
      codes += 8 * weight_.code_stride;
      scales += int64_t{8} * weight_.groups * kScaleBytes;  // a multiple of four
    }
    if (kHasZeros && weight_.zeros != nullptr) {
      const uint64_t zeros = (reinterpret_cast<uint64_t>(weight_.zeros) + at) & ~uint64_t{3};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint64_t from = zeros + int64_t{8} * i * weight_.groups;
        ptx::cp_async_ca_shared_global_4_fill(words + kChunks * 128 + i * 128, reinterpret_cast<const void*>(from),
                                              8 * i < rows_left ? 4 : 0);
      }
    }
    codes_ += 64;  // 16 bytes of four lanes
    k_ += span_of(kFormat);
  }

  // What fetch brought for the lane's k.
  __device__ __forceinline__ void take(int stage, int32_t k, Chunk (&chunks)[kChunks]) const {
    const uint32_t source = ring_ + stage * kStageBytes;
    const int32_t group = k >> group_shift_;
    const uint32_t scale_shift = ((scale_at_ + group * kScaleBytes) & 3) * 8;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t scale = ptx::ld_shared_b32(source + kChunks * 512 + i * 128 - lane_ * 12) >> scale_shift;
      int32_t zero = group_format::middle_code(kFormat);
      if (kHasZeros && weight_.zeros != nullptr) {
        const uint32_t zero_shift = ((zero_at_ + group) & 3) * 8;
        const uint32_t word = ptx::ld_shared_b32(source + kChunks * 640 + i * 128 - lane_ * 12);
        zero = static_cast<int32_t>(word >> zero_shift & 0xff);
      }
      chunks[i].set(ptx::ld_shared_v4(source + i * 512), scale, zero);
    }
  }

 private:
  const WeightArguments& weight_;
  uint32_t ring_;
  int32_t lane_, group_shift_;
  uint32_t scale_at_, zero_at_;
  const uint8_t* codes_ = nullptr;
  int64_t groups_before_ = 0;
  int32_t rows_left_ = 0, k_ = 0;
};

}  // namespace kernel_pytorch::quantized_matmul
