// Forward on mma: a block of threads has 64 rows (tokens by heads of a group) and does everything for them: the
// compressed branch, the choice of blocks, the chosen blocks of all its tokens one after the other, and the window. A
// warp passes over blocks that none of its tokens chose. Means are elements, made by compress_elements. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/choose.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/means.cuh"

namespace kernel_pytorch::native_sparse_attention {

template <class Element, int kSize>
class MmaForward {
  using Tile = QueryTile<Element, kSize, false>;

 public:
  __device__ __forceinline__ MmaForward(const MmaArguments& arguments, char* shared)
      : arguments_(arguments), all_(arguments.all), tile_(arguments, shared), scale_(arguments.all.scale * kLog2e) {}

  __device__ __forceinline__ void run() {
    tile_.start();
    total_.clear();
    const bool has_compressed = all_.gates[0].data != nullptr;
    if (has_compressed || all_.chooses) {
      int32_t low[2], high[2];
      float logarithm[2] = {};
      tile_.compressed_ranges(low, high);
      begin_branch();
      RangeSteps steps = tile_.compressed_steps();
      tile_.walk(steps, all_.compressed_key, all_.compressed_value, has_compressed,
                 [&](const RangeSteps&, const KeyStep& step, int stage) {
                   attend(step, stage, low, high, {0.0f, 0.0f}, has_compressed);
                 });
      end_branch(0, logarithm);
      if (all_.chooses) choose(low, high, logarithm);
    }
    if (all_.gates[1].data != nullptr) {
      if (!all_.chooses) tile_.load_lists();
      begin_branch();
      tile_.walk_lists(
          [&](const KeyStep& step, int stage, const int32_t(&low)[2], const int32_t(&high)[2], const float(&times)[2]) {
            const float logarithms[2] = {times[0] == 1.0f ? 0.0f : ptx::lg2_approx_ftz_f32(times[0]),
                                         times[1] == 1.0f ? 0.0f : ptx::lg2_approx_ftz_f32(times[1])};
            attend(step, stage, low, high, logarithms, true);
          });
      float logarithm[2];
      end_branch(1, logarithm);
    }
    if (all_.gates[2].data != nullptr) {
      int32_t low[2], high[2];
      float logarithm[2];
      tile_.window_ranges(low, high);
      begin_branch();
      RangeSteps steps = tile_.window_steps();
      tile_.walk(steps, all_.key, all_.value, true, [&](const RangeSteps&, const KeyStep& step, int stage) {
        attend(step, stage, low, high, {0.0f, 0.0f}, true);
      });
      end_branch(2, logarithm);
    }
    finish();
  }

 private:
  __device__ __forceinline__ void begin_branch() {
    sums_.clear();
    softmax_ = RunningSoftmax();
  }

  __device__ __forceinline__ void attend(const KeyStep& step, int stage, const int32_t (&low)[2],
                                         const int32_t (&high)[2], const float (&times)[2], bool with_values) {
    if (!sees_any(step, low, high)) return;
    Sums<kMmaKeys> scores;
    multiply_rows<Element, kMmaKeys, kSize>(scores, tile_.query_rows(tile_.warp), tile_.key_rows(stage));
    hide_scores(scores.values, step, low, high);
    float rescale[2];
    softmax_.add(scores.values, scale_, times, rescale);
    if (!with_values) return;
    scale_rows(sums_.values, rescale);
    add_products<Element, kSize, kMmaKeys>(sums_, scores, tile_.value_rows(stage));
  }

  // The branch's result, times its gate, joins the others. `logarithm`: of each row's sum, to base 2, 0 without keys.
  __device__ __forceinline__ void end_branch(int branch, float (&logarithm)[2]) {
    float factor[2];
    softmax_.finish(scale_, logarithm, factor);
    const bool has_gate = all_.gates[branch].data != nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (has_gate) {
        factor[half] *= tile_.gate(branch, half);
        if (all_.lse[branch] != nullptr && tile_.exists[half] && tile_.lane % 4 == 0) {
          all_.lse[branch][tile_.statistic_at(half)] = logarithm[half] * kLn2;
        }
      }
      if (logarithm[half] == tile::minus_infinity()) logarithm[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; has_gate && i < kSize / 2; ++i) total_.values[i] += sums_.values[i] * factor[i / 2 % 2];
  }

  __device__ __forceinline__ void choose(const int32_t (&low)[2], const int32_t (&high)[2],
                                         const float (&logarithm)[2]) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tile_.tokens * all_.key_blocks; i += kMmaThreads) {
      tile_.block_scores[i] = 0;
    }
    RangeSteps steps = tile_.compressed_steps();
    tile_.walk(steps, all_.compressed_key, all_.compressed_value, false,
               [&](const RangeSteps&, const KeyStep& step, int stage) {
                 if (sees_any(step, low, high)) {
                   Sums<kMmaKeys> scores;
                   multiply_rows<Element, kMmaKeys, kSize>(scores, tile_.query_rows(tile_.warp), tile_.key_rows(stage));
                   hide_scores(scores.values, step, low, high);
#pragma unroll
                   for (int i = 0; i < kMmaKeys / 2; ++i) {
                     scores.values[i] = ptx::ex2_approx_ftz_f32(scores.values[i] * scale_ - logarithm[i / 2 % 2]);
                   }
                   sum_heads(tile_, scores.values, arguments_.head_shift);
                 }
                 __syncthreads();
                 add_importance(all_, tile_, step);
               });
    __syncthreads();
    for (int32_t slot = tile_.warp; slot < tile_.tokens; slot += kMmaWarps) choose_list(all_, tile_, slot);
    __syncthreads();
    for (auto i = static_cast<int32_t>(threadIdx.x); all_.selected != nullptr && i < tile_.tokens * all_.list_length;
         i += kMmaThreads) {
      const int32_t token = tile_.first_token + i / all_.list_length;
      if (token < all_.queries) {
        all_.selected[tile_.list_at(token) * all_.list_length + i % all_.list_length] = tile_.lists[i];
      }
    }
  }

  __device__ __forceinline__ void finish() {
    for (int branch = 0; branch < kBranches; ++branch) {
      if (all_.lse[branch] == nullptr || all_.gates[branch].data != nullptr) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (tile_.exists[half] && tile_.lane % 4 == 0) all_.lse[branch][tile_.statistic_at(half)] = nothing();
      }
    }
    if (all_.selected != nullptr && !all_.chooses) {
      for (auto i = static_cast<int32_t>(threadIdx.x); i < tile_.tokens * all_.selected_length; i += kMmaThreads) {
        const int32_t token = tile_.first_token + i / all_.selected_length;
        if (token < all_.queries) {
          all_.selected[tile_.list_at(token) * all_.selected_length + i % all_.selected_length] = -1;
        }
      }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // rows of queries have come, even where there was no step
    tile_.store_rows(all_.output, all_.value_size, total_, 1.0f);
  }

  const MmaArguments& arguments_;
  const Arguments& all_;
  Tile tile_;
  float scale_;
  Sums<kSize> total_, sums_;
  RunningSoftmax softmax_;
};

template <class Element, int kSize>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_forward(const __grid_constant__ MmaArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaForward<Element, kSize>(arguments, shared).run();
}

}  // namespace kernel_pytorch::native_sparse_attention
