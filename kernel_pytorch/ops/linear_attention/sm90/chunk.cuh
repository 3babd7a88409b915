// A scan by chunks of 64 tokens on Hopper's tensor cores. A block takes one head of a sequence, or one segment of it:
// a producer warp drives the copy engine, and each warpgroup holds 64 values of the state, fp32 in registers, with a
// rounded copy in shared memory that queries are multiplied by. A chunk is four products and nothing of it is written
// but the output:
//
//   P = mask(Q K^T) e^(G_t - G_s);  O = e^G Q S + P V;  S <- e^(G_last) S + (e^(G_last - G) K)^T V
//
// Backwards the mask keeps s >= t, and the factors are e^(G_s - G_t), e^(G_last - G_t) and e^G_s.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/linear_attention/sm90/producer.cuh"

namespace kernel_pytorch::linear_attention {

template <class T>
inline constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

template <class T, class Out, ChunkConfig kConfig>
class ChunkConsumer {
  using Mma = ptx::Wgmma<64, kWgmmaType<T>>;
  using RowTile = tile::AlongColumns<kSm90Chunk>;       // queries and keys, summed along columns
  using ValueTile = tile::AlongRows<kSm90Chunk>;        // values, summed along tokens
  using StateTile = tile::AlongRows<kConfig.columns>;   // summed along columns
  static constexpr int kBlocks = kConfig.columns / 64;  // of 64 columns of the state
  static constexpr int kSteps = kConfig.columns / tile::kProductDepth;
  static constexpr int kTokenSteps = kSm90Chunk / tile::kProductDepth;
  static constexpr bool kDecays = kConfig.gates != Gates::kNone;
  static constexpr bool kTurnsTogether = kConfig.only_states && kBlocks == 2;  // registers suffice for both blocks

 public:
  __device__ __forceinline__ ChunkConsumer(const ChunkArguments& arguments, ChunkShared& shared, uint32_t tiles,
                                           int warpgroup)
      : arguments_(arguments),
        shared_(shared),
        tiles_(tiles),
        warpgroup_(warpgroup),
        warp_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32 % 4), 0)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        first_value_(static_cast<int>(blockIdx.y) * kConfig.warpgroups * kSm90Values + warpgroup * kSm90Values) {}

  __device__ __forceinline__ void run() {
    const ScanArguments& scan = arguments_.scan;
    const Stretch stretch = stretch_of(arguments_);
    read_state();
    float total = 0;
    if constexpr (!kConfig.only_states) publish_state(0);
    tile::PipelineState place;
#pragma unroll 1
    for (int32_t i = 0; i < stretch.chunks; ++i) {
      const int64_t first = stretch.begin + static_cast<int64_t>(stretch.chunk(i, scan.backwards)) * kSm90Chunk;
      const int64_t left = stretch.end - first;
      const int count = left < kSm90Chunk ? static_cast<int>(left) : kSm90Chunk;
      shared_.full[place.stage].wait(place.parity);
      total += chunk(place.stage, stretch, first, count, i);
      place.advance(chunk_stages(kConfig));
    }
    write_state();
    if (kConfig.only_states && arguments_.totals != nullptr && threadIdx.x % 128 == 0 && first_value_ == 0) {
      arguments_.totals[blockIdx.x] = total;
    }
  }

 private:
  // Returns the sum of the chunk's gates. While Q K^T and Q S run, the first keys are turned and scaled and the scores
  // masked; while P V runs, the other keys are turned.
  __device__ __forceinline__ float chunk(int stage, const Stretch& stretch, int64_t first, int count, int32_t number) {
    const ScanArguments& scan = arguments_.scan;
    const uint32_t keys = tiles_ + stage * stage_bytes(kConfig);
    const uint32_t values = keys + rows_bytes(kConfig) + warpgroup_ * values_bytes();
    const uint32_t queries = keys + rows_bytes(kConfig) + kConfig.warpgroups * values_bytes();
    const float* sums = shared_.sums[kConfig.gates == Gates::kToken ? stage : 0];
    const float last = kDecays ? sums[count - 1] : 0.0f;
    if (count < kSm90Chunk && scan.offsets != nullptr) clear_values(values, count);
    float output[Mma::kCount];
    uint32_t weights[Mma::kCount / 2], turned[kBlocks][4 * kTokenSteps];
    const float kept = kDecays ? ptx::ex2_approx_ftz_f32(last) : 1.0f;
    if constexpr (!kConfig.only_states) {
      float scores[Mma::kCount];
      ptx::wgmma_fence();
      tile::multiply<Mma, RowTile, RowTile, kSteps>(scores, RowTile::base(queries), RowTile::base(keys), false);
      ptx::wgmma_commit_group();
      tile::multiply<Mma, RowTile, StateTile, kSteps>(output, RowTile::base(queries),
                                                      StateTile::base(state_address(number & 1)), false);
      ptx::wgmma_commit_group();
      turn_keys(keys, sums, last, count, turned[0]);
      weigh(sums, last, count, scores, output, weights);
    } else {
      turn_keys(keys, sums, last, count, turned[0]);
    }
    decay_block(0, kept, turned[0]);
    if constexpr (kTurnsTogether) {
      turn_keys(keys + kSm90Chunk * tile::kChunkRowBytes, sums, last, count, turned[kBlocks - 1]);
      decay_block(kBlocks - 1, kept, turned[kBlocks - 1]);
    }
    ptx::wgmma_fence();
    if constexpr (!kConfig.only_states) {
      tile::multiply<Mma, ValueTile, kTokenSteps>(output, weights, ValueTile::base(values), true);
    }
    tile::multiply<Mma, ValueTile, kTokenSteps>(state_[0], turned[0], ValueTile::base(values), true);
    if constexpr (kBlocks == 2) {
      if constexpr (!kTurnsTogether) {
        ptx::wgmma_commit_group();
        turn_keys(keys + kSm90Chunk * tile::kChunkRowBytes, sums, last, count, turned[1]);
        decay_block(1, kept, turned[1]);
        ptx::wgmma_fence();
      }
      tile::multiply<Mma, ValueTile, kTokenSteps>(state_[1], turned[1], ValueTile::base(values), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::tie_registers(turned[block]);
      ptx::tie_registers(state_[block]);
    }
    if constexpr (!kConfig.only_states) {
      ptx::tie_registers(weights);
      ptx::tie_registers(output);
    }
    __syncwarp();
    if (lane_ == 0) shared_.empty[stage].arrive();
    if constexpr (!kConfig.only_states) {
      publish_state((number + 1) & 1);
      store(stretch, first, count, output);
    }
    return last;
  }

  // With Q K^T and Q S under way: P, and the output so far.
  __device__ __forceinline__ void weigh(const float* sums, float last, int count, float (&scores)[Mma::kCount],
                                        float (&output)[Mma::kCount], uint32_t (&weights)[Mma::kCount / 2]) {
    const ScanArguments& scan = arguments_.scan;
    const int row = 16 * warp_ + lane_ / 4, column = lane_ % 4 * 2;
    float row_sums[2] = {};
    if constexpr (kDecays) {
      row_sums[0] = sums[row];
      row_sums[1] = sums[row + 8];
    }
    const float scale = scan.query_scale * scan.key_scale;
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) {
      const int t = row + i % 4 / 2 * 8, s = column + i / 4 * 8 + i % 2;
      const bool is_kept = (scan.backwards ? s >= t : s <= t) && s < count;
      float factor = scale;
      if constexpr (kDecays) {
        const float distance = row_sums[i % 4 / 2] - sums[s];
        factor *= ptx::ex2_approx_ftz_f32(scan.backwards ? -distance : distance);
      }
      scores[i] = is_kept ? scores[i] * factor : 0.0f;
    }
    tile::pack_fragment<T>(weights, scores);
    ptx::tie_registers(weights);
    float factors[2] = {scan.query_scale, scan.query_scale};
    if constexpr (kDecays) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factors[i] *= ptx::ex2_approx_ftz_f32(scan.backwards ? last - row_sums[i] : row_sums[i]);
      }
    }
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(output);
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) output[i] *= factors[i % 4 / 2];
    ptx::tie_registers(output);
  }

  __device__ __forceinline__ void decay_block(int block, float kept, uint32_t (&turned)[4 * kTokenSteps]) {
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) state_[block][i] *= kept;
    ptx::tie_registers(turned);
    ptx::tie_registers(state_[block]);
  }

  // Fragments of (factors K)^T of 64 columns, scaled in fp32.
  __device__ __forceinline__ void turn_keys(uint32_t keys, const float* sums, float last, int count,
                                            uint32_t (&turned)[4 * kTokenSteps]) {
    const ScanArguments& scan = arguments_.scan;
    const int matrix = lane_ / 8, token = lane_ % 8 + matrix / 2 * 8, unit = 2 * warp_ + matrix % 2;
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, keys + tile::swizzled_offset(16 * step + token, unit));
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // tokens 16 step + 2 (lane % 4) and the next, then those 8 further
        const int at = step * 16 + lane_ % 4 * 2 + half * 8;
        float factors[2] = {scan.key_scale, scan.key_scale};
        if constexpr (kDecays) {
          factors[0] *= ptx::ex2_approx_ftz_f32(scan.backwards ? sums[at] : last - sums[at]);
          factors[1] *= ptx::ex2_approx_ftz_f32(scan.backwards ? sums[at + 1] : last - sums[at + 1]);
        }
        // What lies behind the end of a sequence may be no number. No branch: products are under way.
        const uint32_t mask = (at < count ? 0xffffu : 0u) | (at + 1 < count ? 0xffff0000u : 0u);
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          float pair[2];
          tile::Word<T>::unpack(words[i], pair);
          pair[0] *= factors[0];
          pair[1] *= factors[1];
          turned[4 * step + i] = tile::Word<T>::pack(pair) & mask;
        }
      }
    }
  }

  // Values of other sequences behind the end of this one: zero times infinity would be no number.
  __device__ __forceinline__ void clear_values(uint32_t values, int count) {
    unsigned char* rows = memory_at(values);
    for (int i = count * 8 + static_cast<int>(threadIdx.x % 128); i < kSm90Chunk * 8; i += 128) {
      *reinterpret_cast<ptx::Word4*>(rows + i * 16) = {0, 0, 0, 0};
    }
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_sync_aligned(1 + warpgroup_, 128);
  }
  static __device__ __forceinline__ unsigned char* memory_at(uint32_t address) {
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }

  __device__ __forceinline__ uint32_t state_address(int32_t which) const {
    return tiles_ + states_at(kConfig) + (warpgroup_ * 2 + which) * state_bytes(kConfig);
  }
  // The state, rounded, where the next chunk's product finds it. The other copy may still be read.
  __device__ __forceinline__ void publish_state(int32_t which) {
    const uint32_t to = state_address(which);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = tile::Word<T>::pack(state_[block] + 8 * group + 2 * i);
        ptx::stmatrix_x4(tile::fragment_address<kConfig.columns>(to, 64 * block + 16 * warp_, group, lane_), words);
      }
    }
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_sync_aligned(1 + warpgroup_, 128);
  }

  template <class Use>
  __device__ __forceinline__ void each_state_element(bool is_turned, const Use& use) {
    const ScanArguments& scan = arguments_.scan;
    const int64_t index = blockIdx.x;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; ++i) {
        const int row = 64 * block + 16 * warp_ + tile::fragment_row(lane_, i);
        const int column = first_value_ + tile::fragment_column(lane_, i);
        const int64_t at = is_turned ? (index * scan.values + column) * scan.columns + row
                                     : (index * scan.columns + row) * scan.values + column;
        if (row < scan.columns && column < scan.values) use(state_[block][i], at);
      }
    }
  }
  __device__ __forceinline__ void read_state() {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (float& element : state_[block]) element = 0;
    }
    if (arguments_.scan.initial == nullptr) return;
    each_state_element(arguments_.scan.initial_is_turned,
                       [&](float& element, int64_t at) { element = arguments_.scan.initial[at]; });
  }
  __device__ __forceinline__ void write_state() {
    if (arguments_.scan.final == nullptr) return;
    each_state_element(arguments_.scan.final_is_turned,
                       [&](float& element, int64_t at) { arguments_.scan.final[at] = element; });
  }

  // Rows of 16-bit elements go through shared memory, a warp's own 16 rows, so that a row is written as one line.
  __device__ __forceinline__ void store(const Stretch& stretch, int64_t first, int count,
                                        const float (&output)[Mma::kCount]) {
    const ScanArguments& scan = arguments_.scan;
    const int head = head_of_block(arguments_);
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; i += 2) {
        const int row = 16 * warp_ + tile::fragment_row(lane_, i);
        const int column = first_value_ + tile::fragment_column(lane_, i);
        if (row >= count || column >= scan.values) continue;
        *reinterpret_cast<float2*>(row_of<float>(scan.output, stretch.batch, first + row, head) + column) =
            float2{output[i], output[i + 1]};
      }
    } else {
      const uint32_t to = tiles_ + outputs_at(kConfig) + warpgroup_ * values_bytes();
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = tile::Word<Out>::pack(output + 8 * group + 2 * i);
        ptx::stmatrix_x4(tile::fragment_address<kSm90Chunk>(to, 16 * warp_, group, lane_), words);
      }
      __syncwarp();
      const unsigned char* rows = memory_at(to);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * warp_ + i * 4 + lane_ / 8, unit = lane_ % 8;
        const int column = first_value_ + unit * 8;
        const auto words = *reinterpret_cast<const ptx::Word4*>(rows + tile::swizzled_offset(row, unit));
        if (row < count && column < scan.values) {
          *reinterpret_cast<ptx::Word4*>(row_of<Out>(scan.output, stretch.batch, first + row, head) + column) = words;
        }
      }
      __syncwarp();
    }
  }

  const ChunkArguments& arguments_;
  ChunkShared& shared_;
  uint32_t tiles_;
  int warpgroup_, warp_, lane_, first_value_;
  float state_[kBlocks][Mma::kCount];
};

template <class T, class Out, ChunkConfig kConfig>
__global__ void __launch_bounds__(chunk_threads(kConfig), 1)
    scan_by_chunks(const __grid_constant__ ChunkArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(memory + barriers_at(kConfig));
  if (threadIdx.x == 0) {
    for (int i = 0; i < chunk_stages(kConfig); ++i) {
      shared.full[i].init(kConfig.gates == Gates::kToken ? 2 : 1);
      shared.empty[i].init(4 * kConfig.warpgroups);
    }
  }
  if (kConfig.gates == Gates::kDecay && threadIdx.x < kSm90Chunk) {
    shared.sums[0][threadIdx.x] =
        finite_gate(arguments.scan.decay[head_of_block(arguments)]) * kLog2OfE * static_cast<float>(threadIdx.x + 1);
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const uint32_t tiles = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if constexpr (kConfig.warpgroups == 2) ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < 32) produce<T, kConfig>(arguments, shared, tiles);
  } else {
    if constexpr (kConfig.warpgroups == 2) ptx::setmaxnreg_inc<232>();
    ChunkConsumer<T, Out, kConfig>(arguments, shared, tiles, warpgroup - 1).run();
  }
}

// Each thread takes one element of one head's state through its segments.
__global__ void __launch_bounds__(kJoinThreads) join_segments(const __grid_constant__ JoinArguments arguments) {
  const int64_t size = static_cast<int64_t>(arguments.columns) * arguments.values;
  const int64_t at = static_cast<int64_t>(blockIdx.y) * kJoinThreads + threadIdx.x, index = blockIdx.x;
  if (at >= size) return;
  const int64_t row = at / arguments.values, column = at - row * arguments.values;
  const int64_t turned = column * arguments.columns + row;
  float state = 0;
  if (arguments.initial != nullptr) {
    state = arguments.initial[index * size + (arguments.initial_is_turned ? turned : at)];
  }
  for (int i = 0; i < arguments.segments; ++i) {
    const int64_t segment = index * arguments.segments + (arguments.backwards ? arguments.segments - 1 - i : i);
    arguments.starts[segment * size + at] = state;
    state = state * ptx::ex2_approx_ftz_f32(arguments.totals[segment]) + arguments.shares[segment * size + at];
  }
  if (arguments.final != nullptr) arguments.final[index * size + (arguments.final_is_turned ? turned : at)] = state;
}

}  // namespace kernel_pytorch::linear_attention
