// Gradients of queries and gates on mma: a block of threads has 64 rows (tokens by heads of a group), as the forward
// has, and walks over the keys of each branch twice: for the sums of P * dP, then for the gradient. It leaves the
// statistics of its rows, and in the maps of blocks its tokens, for the backward of keys. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/means.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/tile.cuh"

namespace kernel_pytorch::native_sparse_attention {

template <class Element, int kSize>
class MmaBackwardQuery {
  using Tile = QueryTile<Element, kSize, true, 1>;

 public:
  __device__ __forceinline__ MmaBackwardQuery(const MmaArguments& arguments, char* shared)
      : arguments_(arguments),
        all_(arguments.all),
        tile_(arguments, shared, static_cast<int32_t>(blockIdx.x)),
        scale_(arguments.all.scale * kLog2e) {}

  __device__ __forceinline__ void run() {
    tile_.start();
    grad_.clear();
#pragma unroll 1
    for (int branch = 0; branch < kBranches; ++branch) {
      if (all_.gates[branch].data == nullptr) continue;
      if (branch == 1) {
        tile_.load_lists();
        __syncthreads();
        map_tokens();
      }
      load_statistics(branch);
      walk(branch, false);
      finish_delta(branch);
      walk(branch, true);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // rows of queries have come, even where no branch walked
    tile_.store_rows(all_.grad_query, all_.size, grad_, all_.scale);
  }

 private:
  __device__ __forceinline__ void walk(int branch, bool is_second) {
    if (branch == 1) {
      tile_.walk_lists([&](const KeyStep& step, int stage, const int32_t(&low)[2], const int32_t(&high)[2],
                           const float(&times)[2]) { differentiate(step, stage, low, high, times, is_second); });
      return;
    }
    int32_t low[2], high[2];
    if (branch == 0) {
      tile_.compressed_ranges(low, high);
    } else {
      tile_.window_ranges(low, high);
    }
    RangeSteps steps = branch == 0 ? tile_.compressed_steps() : tile_.window_steps();
    tile_.walk(steps, branch == 0 ? all_.compressed_key : all_.key, branch == 0 ? all_.compressed_value : all_.value,
               true, [&](const KeyStep& step, int stage) {
                 differentiate(step, stage, low, high, {1.0f, 1.0f}, is_second);
               });
  }

  __device__ __forceinline__ void differentiate(const KeyStep& step, int stage, const int32_t (&low)[2],
                                                const int32_t (&high)[2], const float (&times)[2], bool is_second) {
#pragma unroll 1
    for (int32_t begin = 0; begin < step.rows; begin += kMmaPart) {
      const KeyStep part{step.first + begin, min(kMmaPart, step.rows - begin), step.block};
      if (!sees_any(part, low, high)) continue;
      const uint32_t key_rows = tile_.key_rows(stage) + begin * Tile::kPitch;
      Sums<kMmaPart> scores, differences;
      multiply_rows<Element, kMmaPart, kSize>(scores, tile_.query_rows(tile_.warp), key_rows);
      multiply_rows<Element, kMmaPart, kSize>(differences, tile_.grad_rows(tile_.warp),
                                              tile_.value_rows(stage) + begin * Tile::kPitch);
      hide_scores(scores.values, part, low, high);
#pragma unroll
      for (int i = 0; i < kMmaPart / 2; ++i) {
        const int half = i / 2 % 2;
        const float share = times[half] * ptx::ex2_approx_ftz_f32(scores.values[i] * scale_ - lse_[half]);
        if (is_second) {
          scores.values[i] = gate_[half] * share * (differences.values[i] - delta_[half]);
        } else {
          delta_[half] += share * differences.values[i];
        }
      }
      if (is_second) add_products<Element, kSize, kMmaPart>(grad_, scores, key_rows);
    }
  }

  __device__ __forceinline__ void load_statistics(int branch) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = tile_.exists(half) ? all_.lse[branch][tile_.statistic_at(half)] : 0.0f;
      lse_[half] = lse == tile::minus_infinity() ? 0.0f : lse * kLog2e;
      gate_[half] = tile_.gate(branch, half);
      delta_[half] = 0;
    }
  }

  __device__ __forceinline__ void finish_delta(int branch) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      delta_[half] += __shfl_xor_sync(0xffffffffu, delta_[half], 1);
      delta_[half] += __shfl_xor_sync(0xffffffffu, delta_[half], 2);
      if (!tile_.exists(half) || tile_.lane % 4 != 0) continue;
      const int32_t token = tile_.first_token + tile_.slot(half);
      const int64_t at = (static_cast<int64_t>(tile_.batch) * all_.queries + token) * all_.heads + tile_.head(half);
      arguments_.statistics[branch][at] = {lse_[half], delta_[half], gate_[half], 0.0f};
      store_gate<Element>(all_.grad_gates[branch], tile_.batch, token, tile_.head(half), delta_[half]);
    }
  }

  __device__ __forceinline__ void map_tokens() {
    const int64_t head = static_cast<int64_t>(tile_.batch) * all_.key_heads + tile_.key_head;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tile_.tokens * all_.list_length; i += kMmaThreads) {
      const int32_t own = i / all_.list_length, block = tile_.lists[i], token = tile_.first_token + own;
      const int32_t place = tile_.places[own].place;
      if (place < 0 || block < 0 || block > place / all_.block_size) continue;
      const uint32_t bit = 1u << (token % 32);
      uint32_t* word = arguments_.seen_by + (head * all_.key_blocks + block) * arguments_.words + token / 32;
      if ((atomicOr(word, bit) & bit) != 0) *arguments_.repeats = 1;
    }
  }

  const MmaArguments& arguments_;
  const Arguments& all_;
  Tile tile_;
  float scale_;
  Sums<kSize> grad_;
  float lse_[2], gate_[2], delta_[2];
};

template <class Element, int kSize>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_backward_query(const __grid_constant__ MmaArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaBackwardQuery<Element, kSize>(arguments, shared).run();
}

// Maps of blocks without a token, before all others.
__global__ void __launch_bounds__(kMmaThreads) clear_maps(const __grid_constant__ MmaArguments arguments) {
  const Arguments& a = arguments.all;
  const int64_t words = int64_t{a.batch} * a.key_heads * a.key_blocks * arguments.words;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kMmaThreads + threadIdx.x;
  if (thread == 0) *arguments.repeats = 0;
  for (int64_t i = thread; i < words; i += static_cast<int64_t>(gridDim.x) * kMmaThreads) arguments.seen_by[i] = 0;
}

}  // namespace kernel_pytorch::native_sparse_attention
