// The delta rule from chunk to chunk on Hopper's tensor cores (chunk_cuda.h has the formulas). A block takes one head
// of a sequence: a producer warp drives the copy engine, and each warpgroup holds 64 values of the state, fp32 in
// registers, with a rounded copy in shared memory that keys and queries are multiplied by. What is left to write, V -
// (e^G K) S, takes the place of the values; M times it, U, has a place of its own. For a gradient (Pass::kStates) the
// states and the errors N (V - (e^G K) S) go to memory instead of an output. sm_90a.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/sm90/state.cuh"

namespace kernel_pytorch::linear_attention::delta {

template <class T, DeltaConfig kConfig>
class DeltaConsumer : DeltaState<T, kConfig> {
  using Base = DeltaState<T, kConfig>;
  using Base::arguments_, Base::shared_, Base::tiles_, Base::warpgroup_, Base::warp_, Base::lane_, Base::state_;
  using Base::kBlocks, Base::kSteps, Base::kTokenSteps;
  using Base::load_matrix, Base::decay_state, Base::store_output, Base::memory_at;
  using Base::read_state, Base::write_state, Base::publish_state, Base::publish, Base::store_tokens, Base::turn_rows;
  using Base::state_address, Base::write_address, Base::keep_state, Base::copy_rows, Base::kept_place, Base::has_values;
  using typename Base::Mma;
  using typename Base::RowTile;
  using typename Base::StateTile;
  using typename Base::ValueTile;
  static constexpr bool kWrites = kConfig.pass == Pass::kForward;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const Course course = course_of(arguments_);
    read_state(course);
    publish_state();
    tile::PipelineState place;
#pragma unroll 1
    for (int32_t i = 0; i < course.chunks; ++i) {
      const int64_t first = course.span.begin + static_cast<int64_t>(i) * kChunkTokens;
      const int64_t left = course.span.end - first;
      shared_.full[place.stage].wait(place.parity);
      chunk(place.stage, course, i, first, left < kChunkTokens ? static_cast<int>(left) : kChunkTokens);
      place.advance(delta_stages(kConfig));
    }
    write_state(course);
  }

 private:
  __device__ __forceinline__ void chunk(int stage, const Course& course, int32_t number, int64_t first, int count) {
    const uint32_t keys = tiles_ + stage * delta_stage_bytes(kConfig), queries = keys + queries_at(kConfig);
    const uint32_t values = keys + values_at(kConfig) + warpgroup_ * kGroupBytes;
    const uint32_t written = keys + written_at(kConfig);
    const float* factors = reinterpret_cast<const float*>(memory_at(keys + factors_at(kConfig)));
    float left[Mma::kCount], output[Mma::kCount];
    uint32_t matrix[4 * kTokenSteps], turned[kBlocks][4 * kTokenSteps];
    ptx::wgmma_fence();
    tile::multiply<Mma, RowTile, StateTile, kSteps>(left, RowTile::base(keys), StateTile::base(state_address()), false);
    ptx::wgmma_commit_group();
    if constexpr (kWrites) {
      tile::multiply<Mma, RowTile, StateTile, kSteps>(output, RowTile::base(queries), StateTile::base(state_address()),
                                                      false);
      ptx::wgmma_commit_group();
    } else if (has_values()) {
      keep_state(course, number);
    }
    load_matrix(keys + matrix_at(kConfig), matrix);
    turn_rows(written, factors + kWrittenKeys, 1.0f, count, turned[0]);
    ptx::wgmma_wait_group<kWrites ? 1 : 0>();
    ptx::tie_registers(left);
    leave(values, factors, count, left);
    if constexpr (kWrites) {
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(output);
    }
    publish();  // every warp has read the state, too

    ptx::tie_registers(matrix);
    ptx::wgmma_fence();
    tile::multiply<Mma, ValueTile, kTokenSteps>(left, matrix, ValueTile::base(values), false);
    ptx::wgmma_commit_group();
    if constexpr (kWrites && !kConfig.by_channel) scale_output(factors, output);
    if constexpr (kBlocks == 2) {
      turn_rows(written + kChunkTokens * tile::kChunkRowBytes, factors + kWrittenKeys, 1.0f, count,
                turned[kBlocks - 1]);
    }
    decay_state(factors);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(left);
    ptx::tie_registers(matrix);
    uint32_t weights[4 * kTokenSteps];
    if constexpr (kWrites) {
      store_tokens(write_address(), left);
      load_matrix(keys + weights_at(kConfig), weights);
    } else {
      keep_errors(course, number, factors, left);
    }
    publish();

    if constexpr (kWrites) {
      ptx::tie_registers(weights);
      ptx::tie_registers(output);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::tie_registers(turned[block]);
      ptx::tie_registers(state_[block]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tile::multiply<Mma, ValueTile, kTokenSteps>(state_[block], turned[block], ValueTile::base(write_address()), true);
    }
    ptx::wgmma_commit_group();
    if constexpr (kWrites) {
      tile::multiply<Mma, ValueTile, kTokenSteps>(output, weights, ValueTile::base(write_address()), true);
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<kWrites ? 1 : 0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::tie_registers(turned[block]);
      ptx::tie_registers(state_[block]);
    }
    publish_state();
    if constexpr (kWrites) {
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(weights);
      ptx::tie_registers(output);
      store_output(values, arguments_.output, course, first, count, output);
    }
    if (lane_ == 0) shared_.empty[stage].arrive();
  }

  // values <- values - factor left; nothing behind the end, where values may be no numbers.
  __device__ __forceinline__ void leave(uint32_t values, const float* factors, int count, float (&left)[Mma::kCount]) {
    const int row = 16 * warp_ + lane_ / 4;
    float own[2] = {1, 1};
    if constexpr (!kConfig.by_channel) {
      own[0] = factors[kReadKeys + row];
      own[1] = factors[kReadKeys + row + 8];
    }
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t words[4];
      const uint32_t place = tile::fragment_address<kChunkTokens>(values, 16 * warp_, group, lane_);
      ptx::ldmatrix_x4(words, place);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float pair[2];
        tile::Word<T>::unpack(words[i], pair);
        const int at = 8 * group + 2 * i, half = i % 2;
        pair[0] -= own[half] * left[at];
        pair[1] -= own[half] * left[at + 1];
        words[i] = row + 8 * half < count ? tile::Word<T>::pack(pair) : 0u;
      }
      ptx::stmatrix_x4(place, words);
    }
  }

  // The errors to memory; times beta, which is U, to where the products read it.
  __device__ __forceinline__ void keep_errors(const Course& course, int32_t number, const float* factors,
                                              float (&errors)[Mma::kCount]) {
    const int row = kBetas + 16 * warp_ + lane_ / 4;
    const float beta[2] = {factors[row], factors[row + 8]};
    store_tokens(write_address(), errors);
    __syncwarp();
    if (has_values()) {
      copy_rows(write_address(), 0,
                static_cast<unsigned char*>(arguments_.rows) + kept_place(course, number) * kGroupBytes);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) errors[i] *= beta[i % 4 / 2];
    store_tokens(write_address(), errors);
  }

  __device__ __forceinline__ void scale_output(const float* factors, float (&output)[Mma::kCount]) {
    const int row = 16 * warp_ + lane_ / 4;
    const float own[2] = {factors[kReadQueries + row], factors[kReadQueries + row + 8]};
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) output[i] *= own[i % 4 / 2];
  }
};

template <class T, DeltaConfig kConfig>
__global__ void __launch_bounds__(delta_threads(kConfig), 1)
    delta_by_chunks(const __grid_constant__ DeltaChunkArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  run_roles<DeltaConsumer<T, kConfig>, kConfig>(arguments, memory);
}

}  // namespace kernel_pytorch::linear_attention::delta
