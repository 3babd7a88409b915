// A scan by chunks of 64 tokens on Hopper's tensor cores, in three roles: a warp drives the copy engine, a warpgroup
// scales what gates decay and makes scores (scaler.cuh), and each other warpgroup holds 64 values of the state, fp32 in
// registers. They are chunks apart, so that the state waits for nothing but its own products:
//
//   U <- e^(..) U;  O = Q U + P V;  U <- U + K^T V       Q, K, V scaled, U the state but for a factor of each channel
#pragma once

#include "kernel_pytorch/ops/linear_attention/sm90/scaler.cuh"

namespace kernel_pytorch::linear_attention {

template <class T, class Out, SplitConfig kConfig>
class StateKeeper {
  using Mma = ptx::Wgmma<64, kSplitWgmmaType<T>>;
  using RowTile = tile::AlongColumns<kSm90Chunk>;
  using TokenTile = tile::AlongRows<kSm90Chunk>;       // summed along tokens
  using StateTile = tile::AlongRows<kConfig.columns>;  // summed along columns
  static constexpr int kBlocks = kConfig.columns / 64;
  static constexpr int kSteps = kConfig.columns / tile::kProductDepth;
  static constexpr int kTokenSteps = kSm90Chunk / tile::kProductDepth;
  static constexpr bool kGatesValues = kConfig.gates == SplitGates::kValues;

 public:
  __device__ __forceinline__ StateKeeper(const ChunkArguments& arguments, SplitShared& shared, uint32_t tiles,
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
    tile::PipelineState place, slot;
#pragma unroll 1
    for (int32_t i = 0; i < stretch.chunks;) {
      shared_.full[place.stage].wait(place.parity);
      shared_.ready[slot.stage].wait(slot.parity);
      const bool is_last = window(place.stage, slot.stage, stretch,
                                  stretch.begin + static_cast<int64_t>(stretch.chunk(i, scan.backwards)) * kSm90Chunk);
      slot.advance(kSplitSlots);
      if (!is_last) continue;
      place.advance(split_stages(kConfig));
      ++i;
    }
    if (stretch.chunks > 0) scale_state(shared_.after);
    write_state();
  }

 private:
  // Returns whether it was the last of its chunk.
  __device__ __forceinline__ bool window(int stage, int place, const Stretch& stretch, int64_t first) {
    const SplitSlot& slot = shared_.slots[place];
    const uint32_t keys = tiles_ + stage * split_stage_bytes(kConfig);
    const uint32_t values = keys + split_rows_bytes(kConfig) + warpgroup_ * values_bytes();
    const uint32_t queries = keys + split_rows_bytes(kConfig) + kConfig.warpgroups * values_bytes();
    const int begin = slot.begin, end = slot.end;
    const bool is_last = slot.is_last;
    float output[Mma::kCount];
    scale_state(slot.factors);
    if constexpr (!kConfig.only_states) {
      const uint32_t state = tiles_ + split_states_at(kConfig) + warpgroup_ * split_state_bytes(kConfig);
      publish_state(state);
      ptx::wgmma_fence();
      tile::multiply<Mma, RowTile, StateTile, kSteps>(output, RowTile::base(queries), StateTile::base(state), false);
      tile::multiply<Mma, RowTile, TokenTile, kTokenSteps>(
          output, RowTile::base(tiles_ + split_scores_at(kConfig) + place * kScoreBytes), TokenTile::base(values),
          true);
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tile::multiply<Mma, TokenTile, TokenTile, kTokenSteps>(
          state_[block], TokenTile::base(keys + block * kSm90Chunk * tile::kChunkRowBytes), TokenTile::base(values),
          true);
    }
    ptx::wgmma_commit_group();
    if constexpr (!kConfig.only_states) {
      ptx::wgmma_wait_group<1>();
      ptx::tie_registers(output);
      scale_output(output);
      store(stretch, first, begin, end, output);
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::tie_registers(state_[block]);
    __syncwarp();
    if (lane_ == 0) {
      shared_.taken[place].arrive();
      if (is_last) shared_.empty[stage].arrive();
    }
    // The other warps' products have read the rounded state.
    if constexpr (!kConfig.only_states) meet();
    return is_last;
  }
  __device__ __forceinline__ void meet() {
    ptx::barrier_sync_aligned(kStateBarrier + warpgroup_, 128);
  }

  __device__ __forceinline__ void scale_state(const float* factors) {
    if constexpr (kGatesValues) {
      const float* own = factors + warpgroup_ * kSm90Values + lane_ % 4 * 2;
#pragma unroll
      for (int group = 0; group < kSm90Values / 8; ++group) {
        const float2 pair = *reinterpret_cast<const float2*>(own + 8 * group);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          state_[block][4 * group] *= pair.x;
          state_[block][4 * group + 1] *= pair.y;
          state_[block][4 * group + 2] *= pair.x;
          state_[block][4 * group + 3] *= pair.y;
        }
      }
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float* own = factors + 64 * block + 16 * warp_ + lane_ / 4;
        const float rows[2] = {own[0], own[8]};
#pragma unroll
        for (int i = 0; i < Mma::kCount; ++i) state_[block][i] *= rows[i % 4 / 2];
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::tie_registers(state_[block]);
  }

  // The state, rounded, where the product with queries finds it.
  __device__ __forceinline__ void publish_state(uint32_t to) {
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
    meet();
  }

  __device__ __forceinline__ uint32_t output_memory() const {  // of this warp
    return tiles_ + split_outputs_at(kConfig) + (4 * warpgroup_ + warp_) * (split_output_bytes(kConfig) / 4);
  }
  static __device__ __forceinline__ unsigned char* memory_at(uint32_t address) {
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }

  __device__ __forceinline__ void scale_output(float (&output)[Mma::kCount]) {
    const float scale = arguments_.scan.query_scale;
    const unsigned char* factors = memory_at(output_memory());
#pragma unroll
    for (int i = 0; i < Mma::kCount; i += 2) {
      float pair[2] = {scale, scale};
      if constexpr (kGatesValues) {
        const float2 own = *reinterpret_cast<const float2*>(
            factors + output_factor_offset(tile::fragment_row(lane_, i), tile::fragment_column(lane_, i)));
        pair[0] *= own.x;
        pair[1] *= own.y;
      }
      output[i] *= pair[0];
      output[i + 1] *= pair[1];
    }
    if constexpr (kGatesValues) __syncwarp();
  }

  // Rows of 16-bit elements go through shared memory, a warp's own 16 rows, so that a row is written as one line.
  __device__ __forceinline__ void store(const Stretch& stretch, int64_t first, int begin, int end,
                                        const float (&output)[Mma::kCount]) {
    const ScanArguments& scan = arguments_.scan;
    const int head = head_of_block(arguments_);
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; i += 2) {
        const int row = 16 * warp_ + tile::fragment_row(lane_, i);
        const int column = first_value_ + tile::fragment_column(lane_, i);
        if (row < begin || row >= end || column >= scan.values) continue;
        *reinterpret_cast<float2*>(row_of<float>(scan.output, stretch.batch, first + row, head) + column) =
            float2{output[i], output[i + 1]};
      }
    } else {
      const uint32_t to = output_memory();
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = tile::Word<Out>::pack(output + 8 * group + 2 * i);
        ptx::stmatrix_x4(tile::fragment_address<kSm90Chunk>(to, 0, group, lane_), words);
      }
      __syncwarp();
      const unsigned char* rows = memory_at(to);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = i * 4 + lane_ / 8, row = 16 * warp_ + own, unit = lane_ % 8;
        const int column = first_value_ + unit * 8;
        const auto words = *reinterpret_cast<const ptx::Word4*>(rows + tile::swizzled_offset(own, unit));
        if (row >= begin && row < end && column < scan.values) {
          *reinterpret_cast<ptx::Word4*>(row_of<Out>(scan.output, stretch.batch, first + row, head) + column) = words;
        }
      }
      __syncwarp();
    }
  }

  template <class Use>
  __device__ __forceinline__ void each_state_element(bool is_turned, const Use& use) {
    const ScanArguments& scan = arguments_.scan;
    const int row_stride = is_turned ? 1 : scan.values, column_stride = is_turned ? scan.columns : 1;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * scan.columns * scan.values;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; ++i) {
        const int row = 64 * block + 16 * warp_ + tile::fragment_row(lane_, i);
        const int column = first_value_ + tile::fragment_column(lane_, i);
        if (row < scan.columns && column < scan.values) {
          use(state_[block][i], first, row * row_stride + column * column_stride);
        }
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
                       [&](float& element, int64_t first, int at) { element = (arguments_.scan.initial + first)[at]; });
  }
  __device__ __forceinline__ void write_state() {
    if (arguments_.scan.final == nullptr) return;
    each_state_element(arguments_.scan.final_is_turned,
                       [&](float& element, int64_t first, int at) { (arguments_.scan.final + first)[at] = element; });
  }

  const ChunkArguments& arguments_;
  SplitShared& shared_;
  uint32_t tiles_;
  int warpgroup_, warp_, lane_, first_value_;
  float state_[kBlocks][Mma::kCount];
};

template <class T, class Out, SplitConfig kConfig>
__global__ void __launch_bounds__(split_threads(kConfig), 1)
    scan_split(const __grid_constant__ ChunkArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  SplitShared& shared = *reinterpret_cast<SplitShared*>(memory + split_barriers_at(kConfig));
  if (threadIdx.x == 0) {
    for (int i = 0; i < split_stages(kConfig); ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * kConfig.warpgroups);
    }
    for (int i = 0; i < kSplitSlots; ++i) {
      shared.ready[i].init(4);
      shared.taken[i].init(4 * kConfig.warpgroups);
    }
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const uint32_t tiles = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  constexpr bool kManyForState = kConfig.gates == SplitGates::kValues;  // registers: an output has factors there
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kManyForState && kConfig.warpgroups == 2 ? 32 : 40>();
    if (threadIdx.x < 32) produce_chunks<kConfig>(arguments, shared, tiles);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_inc<kConfig.warpgroups == 1 ? 224 : kManyForState ? 144 : 184>();
    Scaler<T, kConfig>(arguments, shared, tiles).run();
  } else {
    ptx::setmaxnreg_inc<kConfig.warpgroups == 1 ? 216 : kManyForState ? 168 : 144>();
    StateKeeper<T, Out, kConfig>(arguments, shared, tiles, warpgroup - 2).run();
  }
}

// Each thread takes one element of one head's state through its segments.
__global__ void __launch_bounds__(kJoinThreads)
    join_split_segments(const __grid_constant__ SplitJoinArguments arguments) {
  const JoinArguments& join = arguments.join;
  const int64_t size = static_cast<int64_t>(join.columns) * join.values;
  const int64_t at = static_cast<int64_t>(blockIdx.y) * kJoinThreads + threadIdx.x, index = blockIdx.x;
  if (at >= size) return;
  const int64_t row = at / join.values, column = at - row * join.values;
  const int64_t turned = column * join.columns + row;
  const int64_t gated = arguments.gates_values ? join.values : join.columns;
  const int64_t channel = arguments.gates_values ? column : row;
  float state = 0;
  if (join.initial != nullptr) state = join.initial[index * size + (join.initial_is_turned ? turned : at)];
  for (int i = 0; i < join.segments; ++i) {
    const int64_t segment = index * join.segments + (join.backwards ? join.segments - 1 - i : i);
    join.starts[segment * size + at] = state;
    state = state * ptx::ex2_approx_ftz_f32(join.totals[segment * gated + channel]) + join.shares[segment * size + at];
  }
  if (join.final != nullptr) join.final[index * size + (join.final_is_turned ? turned : at)] = state;
}

}  // namespace kernel_pytorch::linear_attention
