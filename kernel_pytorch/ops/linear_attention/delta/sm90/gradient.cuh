// The gradient of the state from the last chunk to the first on Hopper's tensor cores, with D the gradient of the state
// behind a chunk, N = (I + A')^-1 (prepare.cuh) and dO the output's:
//
//   dU = (e^(G_last - G) K) D + P^T dO;   dV = N^T (beta dU);   D <- e^(G_last) D + (scale e^G Q)^T dO - (e^G K)^T dV
//
// D and dU of each chunk go to memory, rounded: finish.cuh makes of them what does not go from chunk to chunk. sm_90a.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/sm90/state.cuh"

namespace kernel_pytorch::linear_attention::delta {

template <class T, DeltaConfig kConfig>
class GradientConsumer : DeltaState<T, kConfig> {
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

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const Course course = course_of(arguments_);
    read_state(course);
    publish_state();
    tile::PipelineState place;
#pragma unroll 1
    for (int32_t i = course.chunks - 1; i >= 0; --i) {
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
    const uint32_t values = keys + values_at(kConfig) + warpgroup_ * kGroupBytes;  // the output's gradient
    const float* factors = reinterpret_cast<const float*>(memory_at(keys + factors_at(kConfig)));
    if (count < kChunkTokens && arguments_.offsets != nullptr) clear_values(values, count);
    float grad[Mma::kCount], scores[Mma::kCount];
    uint32_t matrix[4 * kTokenSteps];
    load_matrix(keys + weights_at(kConfig), matrix);
    ptx::tie_registers(matrix);
    ptx::wgmma_fence();
    tile::multiply<Mma, RowTile, StateTile, kSteps>(grad, RowTile::base(keys), StateTile::base(state_address()), false);
    tile::multiply<Mma, ValueTile, kTokenSteps>(scores, matrix, ValueTile::base(values), false);
    ptx::wgmma_commit_group();
    if (has_values()) keep_state(course, number);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad);
    ptx::tie_registers(scores);
    ptx::tie_registers(matrix);
    add_scores(course, number, factors, count, scores, grad);
    load_matrix(keys + matrix_at(kConfig), matrix);
    publish();  // every warp has read the state, too

    uint32_t turned[kBlocks][4 * kTokenSteps];
    ptx::tie_registers(matrix);
    ptx::wgmma_fence();
    tile::multiply<Mma, ValueTile, kTokenSteps>(grad, matrix, ValueTile::base(write_address()), false);
    ptx::wgmma_commit_group();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      turn_rows(queries + block * kBlockBytes, factors + kReadQueries, 1.0f, count, turned[block]);
    }
    decay_state(factors);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad);
    ptx::tie_registers(matrix);
    add_products(turned, values);
    const uint32_t own = tiles_ + delta_writes_at(kConfig) + (kConfig.warpgroups + warpgroup_) * kGroupBytes;
    store_output(own, arguments_.output, course, first, count, grad);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      turn_rows(keys + block * kBlockBytes, factors + kReadKeys, -1.0f, count, turned[block]);
    }
    publish();
    add_products(turned, own);
    publish_state();
    if (lane_ == 0) shared_.empty[stage].arrive();
  }

  static constexpr int kBlockBytes = kChunkTokens * tile::kChunkRowBytes;

  // state += turned tile, waited for.
  __device__ __forceinline__ void add_products(uint32_t (&turned)[kBlocks][4 * kTokenSteps], uint32_t tile) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::tie_registers(turned[block]);
      ptx::tie_registers(state_[block]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tile::multiply<Mma, ValueTile, kTokenSteps>(state_[block], turned[block], ValueTile::base(tile), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::tie_registers(turned[block]);
      ptx::tie_registers(state_[block]);
    }
  }

  // dU, to memory; times beta, to where the product reads it. Nothing behind the end.
  __device__ __forceinline__ void add_scores(const Course& course, int32_t number, const float* factors, int count,
                                             const float (&scores)[Mma::kCount], float (&grad)[Mma::kCount]) {
    const int row = 16 * warp_ + lane_ / 4;
    const float written[2] = {factors[kWrittenKeys + row], factors[kWrittenKeys + row + 8]};
    const float beta[2] = {factors[kBetas + row], factors[kBetas + row + 8]};
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) {
      const int half = i % 4 / 2;
      grad[i] = row + 8 * half < count ? written[half] * grad[i] + scores[i] : 0.0f;
    }
    store_tokens(write_address(), grad);
    __syncwarp();
    if (has_values()) {
      copy_rows(write_address(), 0,
                static_cast<unsigned char*>(arguments_.rows) + kept_place(course, number) * kGroupBytes);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) grad[i] *= beta[i % 4 / 2];
    store_tokens(write_address(), grad);
  }

  // Rows of other sequences behind the end of this one: zero times infinity would be no number.
  __device__ __forceinline__ void clear_values(uint32_t values, int count) {
    unsigned char* rows = memory_at(values);
    for (int i = count * 8 + static_cast<int>(threadIdx.x % 128); i < kChunkTokens * 8; i += 128) {
      *reinterpret_cast<ptx::Word4*>(rows + i * 16) = {0, 0, 0, 0};
    }
    publish();
  }
};

template <class T, DeltaConfig kConfig>
__global__ void __launch_bounds__(delta_threads(kConfig), 1)
    gradient_by_chunks(const __grid_constant__ DeltaChunkArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  run_roles<GradientConsumer<T, kConfig>, kConfig>(arguments, memory);
}

}  // namespace kernel_pytorch::linear_attention::delta
