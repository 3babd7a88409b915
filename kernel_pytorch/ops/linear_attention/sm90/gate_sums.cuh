// Sums of gates of a chunk's tokens, by the warpgroup that scales (scaler.cuh): each thread has two channels and the
// tokens of one part of the chunk. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/ops/linear_attention/sm90/split_parts.cuh"

namespace kernel_pytorch::linear_attention {

// In base 2: half of it is the exponent of a factor, and sums of products of such factors are below the masked ones.
template <class T>
inline constexpr float kMostReach = 80.0f;
template <>
inline constexpr float kMostReach<tile::Float16> = 16.0f;

template <class T, SplitConfig kConfig>
class GateSums {
 protected:
  static constexpr bool kGatesValues = kConfig.gates == SplitGates::kValues;
  static constexpr int kGated = gated_channels(kConfig);
  static constexpr int kPairs = kGated / 2;    // a thread takes two channels
  static constexpr int kParts = 128 / kPairs;  // of a chunk: a thread takes the tokens of one
  static constexpr int kTokens = kSm90Chunk / kParts;
  static constexpr bool kIsScalar = kConfig.gates == SplitGates::kScalar;
  static constexpr int kLanes = kIsScalar ? 1 : 2;  // gates of a token that differ
  static constexpr int kTileBytes = kSm90Chunk * tile::kChunkRowBytes;

  __device__ __forceinline__ GateSums(const ChunkArguments& arguments, SplitShared& shared)
      : arguments_(arguments),
        shared_(shared),
        stretch_(stretch_of(arguments)),
        head_(head_of_block(arguments)),
        thread_(static_cast<int>(threadIdx.x % 128)),
        warp_(__shfl_sync(0xffffffffu, thread_ / 32, 0)),
        pair_(thread_ % kPairs),
        first_token_(thread_ / kPairs * kTokens),
        first_value_(static_cast<int>(blockIdx.y) * kConfig.warpgroups * kSm90Values) {}

  __device__ __forceinline__ int64_t first_of(int32_t i, int& count) const {
    const int64_t first =
        stretch_.begin + static_cast<int64_t>(stretch_.chunk(i, arguments_.scan.backwards)) * kSm90Chunk;
    const int64_t left = stretch_.end - first;
    count = left < kSm90Chunk ? static_cast<int>(left) : kSm90Chunk;
    return first;
  }
  __device__ __forceinline__ void meet() { ptx::barrier_sync_aligned(kScalerBarrier, 128); }

  // Into L2, a chunk ahead: where they are summed, only that is waited for. Registers would not hold them.
  __device__ __forceinline__ void prefetch_gates(int32_t i) const {
    constexpr int kLine = 128;  // bytes
    const ScanArguments& scan = arguments_.scan;
    const ScanTensor& gates = kIsScalar ? scan.gate : scan.channel_gate;
    if (i >= stretch_.chunks || gates.data == nullptr) return;
    int count;
    const int64_t first = first_of(i, count);
    const int size = gates.is_float ? 4 : 2,
              bytes = kIsScalar ? size : min(kGated, gated_size() - gated_first()) * size;
    const int lines = (bytes + kLine - 1) / kLine;
    const char* from = row_of<char>(gates, 0, 0, 0);
    for (int at = thread_; at < count * lines; at += 128) {
      const int64_t element = stretch_.batch * gates.batch_stride + (first + at / lines) * gates.token_stride +
                              head_ / gates.group * gates.head_stride + (kIsScalar ? 0 : gated_first());
      ptx::prefetch_global_l2(from + element * size + at % lines * kLine);
    }
  }
  __device__ __forceinline__ int gated_size() const {
    return kGatesValues ? arguments_.scan.values : arguments_.scan.columns;
  }
  __device__ __forceinline__ int gated_first() const { return kGatesValues ? first_value_ : 0; }

  // The gates of the thread's tokens and channels, in the places of their sums.
  __device__ __forceinline__ void read_gates(int count) {
    const ScanArguments& scan = arguments_.scan;
    count -= first_token_;
    const int64_t first = first_ + first_token_;
    if constexpr (kIsScalar) {
      const float decay = scan.decay != nullptr ? scan.decay[head_] : 0.0f;
      const int64_t stride = scan.gate.token_stride;
      if (scan.gate.data == nullptr) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) sums_[t][0] = t < count ? decay : 0.0f;
      } else if (scan.gate.is_float) {
        const float* from = row_of<float>(scan.gate, stretch_.batch, first, head_);
#pragma unroll
        for (int t = 0; t < kTokens; ++t, from += stride) sums_[t][0] = t < count ? decay + *from : 0.0f;
      } else {
        const T* from = row_of<T>(scan.gate, stretch_.batch, first, head_);
#pragma unroll
        for (int t = 0; t < kTokens; ++t, from += stride) {
          sums_[t][0] = t < count ? decay + tile::to_float<T>(*from) : 0.0f;
        }
      }
    } else {
      const int channel = 2 * pair_ + gated_first();
      if (channel >= gated_size()) count = 0;
      const int64_t stride = scan.channel_gate.token_stride;
      if (scan.channel_gate.is_float) {
        const float* from = row_of<float>(scan.channel_gate, stretch_.batch, first, head_) + channel;
#pragma unroll
        for (int t = 0; t < kTokens; ++t, from += stride) {
          const float2 pair = t < count ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
          sums_[t][0] = pair.x;
          sums_[t][kLanes - 1] = pair.y;
        }
      } else {
        const T* from = row_of<T>(scan.channel_gate, stretch_.batch, first, head_) + channel;
        uint32_t words[kTokens];
#pragma unroll
        for (int t = 0; t < kTokens; ++t, from += stride) {
          words[t] = t < count ? *reinterpret_cast<const uint32_t*>(from) : 0u;
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          float pair[2];
          tile::Word<T>::unpack(words[t], pair);
          sums_[t][0] = pair[0];
          sums_[t][kLanes - 1] = pair[1];
        }
      }
      if (scan.gate.data == nullptr && scan.decay == nullptr) return;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float scalar = t < count ? scalar_gate<T>(scan, stretch_.batch, first + t, head_) : 0.0f;
#pragma unroll
        for (float& gate : sums_[t]) gate += scalar;
      }
    }
  }

  // sums_: of gates in base 2 from the chunk's first token on. Returns a bound of their sizes.
  __device__ __forceinline__ float sum_gates(int count, float (&total)[kLanes]) {
    read_gates(count);
    float sum[kLanes] = {}, reach = 0;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[lane] += ptx::max_nan_f32(sums_[t][lane], kLeastGate) * kLog2OfE;
        sums_[t][lane] = sum[lane];
        reach = ptx::max_nan_f32(reach, sum[lane] < 0 ? -sum[lane] : sum[lane]);
      }
    }
    // Not negative: as integers they are in the same order, and no number is above all.
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(reach) & 0x7fffffffu);
    if (thread_ % 32 == 0) shared_.reach[warp_] = __uint_as_float(most);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      shared_.totals[thread_ / kPairs * kGated + 2 * pair_ + lane] = sum[lane];
      total[lane] = 0;
    }
    meet();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      float before = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float of_part = shared_.totals[part * kGated + 2 * pair_ + lane];
        if (part < thread_ / kPairs) before += of_part;
        total[lane] += of_part;
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) sums_[t][lane] += before;
    }
    const float(&reaches)[4] = shared_.reach;
    const float bound = kParts == 4
                            ? reaches[0] + reaches[1] + reaches[2] + reaches[3]
                            : ptx::max_nan_f32(reaches[0], reaches[1]) + ptx::max_nan_f32(reaches[2], reaches[3]);
    meet();  // totals and reaches may be written again
    return bound;
  }

  // Cuts a chunk into windows, of which it returns the count.
  __device__ __forceinline__ int cut(int count) {
    int windows = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; ++windows) {
      float base[kLanes];
      read_sums(begin - 1, 0, base);
      int first = count;
#pragma unroll
      for (int t = kTokens - 1; t >= 0; --t) {
        const int token = first_token_ + t;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float reach = sums_[t][lane] - base[lane];
          if (token > begin && token < count && (reach > kMostReach<T> || reach < -kMostReach<T>)) first = token;
        }
      }
      first = static_cast<int>(__reduce_min_sync(0xffffffffu, static_cast<unsigned>(first)));
      if (thread_ % 32 == 0) shared_.firsts[warp_] = first;
      if (thread_ == 0) shared_.bounds[windows] = static_cast<uint8_t>(begin);
      meet();
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) first = first < shared_.firsts[warp] ? first : shared_.firsts[warp];
      meet();
      begin = first;
    }
    if (thread_ == 0) shared_.bounds[windows] = static_cast<uint8_t>(count);
    meet();
    return windows;
  }
  // Every thread's sums at `token`, by the threads that have it.
  __device__ __forceinline__ void read_sums(int token, int place, float (&to)[kLanes]) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (first_token_ + t == token) shared_.totals[place + 2 * pair_ + lane] = sums_[t][lane];
      }
    }
    meet();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = token < 0 ? 0.0f : shared_.totals[place + 2 * pair_ + lane];
    meet();
  }

  __device__ __forceinline__ void write_totals(const float (&all)[kLanes]) {
    const ScanArguments& scan = arguments_.scan;
    if (first_token_ != 0 || (!kGatesValues && blockIdx.y != 0)) return;
    const int size = kGatesValues ? scan.values : scan.columns, first = kGatesValues ? first_value_ : 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int channel = first + 2 * pair_ + k;
      if (channel < size) arguments_.totals[static_cast<int64_t>(blockIdx.x) * size + channel] = all[k % kLanes];
    }
  }

  const ChunkArguments& arguments_;
  SplitShared& shared_;
  Stretch stretch_;
  int64_t first_ = 0;  // token of the chunk
  int head_, thread_, warp_, pair_, first_token_, first_value_;
  float sums_[kTokens][kLanes];
};

}  // namespace kernel_pytorch::linear_attention
