// Forward on mma: a block of threads has 64 rows (tokens by heads of a group) and does everything for them: the
// compressed branch, the choice of blocks, the chosen blocks of all its tokens one after the other, and the window. A
// warp passes over blocks that none of its tokens chose. Means are elements, made by compress_elements. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/choose.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/means.cuh"

namespace kernel_pytorch::native_sparse_attention {

template <class Element, int kSize, int kBlocks>
class MmaForward {
  using Tile = QueryTile<Element, kSize, false, kBlocks>;
  static constexpr int kOwn = Tile::kOwn;
  static constexpr int kPart = kBlocks == 1 ? kMmaKeys : kMmaPart;  // columns of scores that fit into registers

 public:
  __device__ __forceinline__ MmaForward(const MmaArguments& arguments, char* shared, int32_t index)
      : arguments_(arguments),
        all_(arguments.all),
        tile_(arguments, shared, index),
        scale_(arguments.all.scale * kLog2e) {}

  __device__ __forceinline__ void run() {
    tile_.start();
    begin_results();
    const bool has_compressed = all_.gates[0].data != nullptr;
    const float zeros[kOwn] = {};
    if (has_compressed || all_.chooses) {
      int32_t low[kOwn], high[kOwn];
      float logarithm[kOwn];
      tile_.compressed_ranges(low, high);
      begin_branch();
      RangeSteps steps = tile_.compressed_steps();
      tile_.walk(steps, all_.compressed_key, all_.compressed_value, has_compressed,
                 [&](const KeyStep& step, int stage) { attend(step, stage, low, high, zeros, has_compressed); });
      end_branch(0, logarithm);
      if (all_.chooses) choose(low, high, logarithm);
    }
    if (all_.gates[1].data != nullptr) {
      if (!all_.chooses) tile_.load_lists();
      begin_branch();
      tile_.walk_lists([&](const KeyStep& step, int stage, const int32_t(&low)[kOwn], const int32_t(&high)[kOwn],
                           const float(&times)[kOwn]) {
        float logarithms[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          logarithms[i] = kBlocks > 1 || times[i] == 1.0f ? 0.0f : ptx::lg2_approx_ftz_f32(times[i]);
        }
        attend(step, stage, low, high, logarithms, true);
      });
      float logarithm[kOwn];
      end_branch(1, logarithm);
    }
    if (all_.gates[2].data != nullptr) {
      int32_t low[kOwn], high[kOwn];
      float logarithm[kOwn];
      tile_.window_ranges(low, high);
      begin_branch();
      RangeSteps steps = tile_.window_steps();
      tile_.walk(steps, all_.key, all_.value, true,
                 [&](const KeyStep& step, int stage) { attend(step, stage, low, high, zeros, true); });
      end_branch(2, logarithm);
    }
    finish();
  }

 private:
  // Results of the branches so far: in registers, or of two blocks of rows in scratch memory, each thread its own.
  __device__ __forceinline__ float4* parked() const {
    return reinterpret_cast<float4*>(arguments_.parked) +
           static_cast<int64_t>(blockIdx.x) * (kBlocks * kSize / 8) * kMmaThreads + threadIdx.x;
  }
  __device__ __forceinline__ void begin_results() {
    if constexpr (kBlocks == 1) {
      total_.clear();
    } else {
#pragma unroll 1
      for (int i = 0; i < kBlocks * kSize / 8; ++i) parked()[i * kMmaThreads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __device__ __forceinline__ void begin_branch() {
#pragma unroll
    for (auto& sums : sums_) sums.clear();
#pragma unroll
    for (auto& softmax : softmax_) softmax = RunningSoftmax();
  }

  __device__ __forceinline__ void attend(const KeyStep& step, int stage, const int32_t (&low)[kOwn],
                                         const int32_t (&high)[kOwn], const float (&times)[kOwn], bool with_values) {
#pragma unroll 1
    for (int32_t begin = 0; begin < step.rows; begin += kPart) {
      const KeyStep part{step.first + begin, min(kPart, step.rows - begin), step.block};
      if (!sees_any(part, low, high)) continue;
      Sums<kPart> scores[kBlocks];
      multiply_rows<Element, kPart, kSize>(scores, tile_.query_rows(tile_.warp * kBlocks),
                                           tile_.key_rows(stage) + begin * Tile::kPitch);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        hide_scores(scores[r].values, part, low + 2 * r, high + 2 * r);
        float rescale[2];
        softmax_[r].add(scores[r].values, scale_, times + 2 * r, rescale);
        scale_rows(sums_[r].values, rescale);
      }
      if (with_values) {
        add_products<Element, kSize, kPart>(sums_, scores, tile_.value_rows(stage) + begin * Tile::kPitch);
      }
    }
  }

  // The branch's result, times its gate, joins the others. `logarithm`: of each row's sum, to base 2, 0 without keys.
  __device__ __forceinline__ void end_branch(int branch, float (&logarithm)[kOwn]) {
    const bool has_gate = all_.gates[branch].data != nullptr;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      float factor[2], own[2];
      softmax_[r].finish(scale_, own, factor);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * r + half;
        if (has_gate) {
          factor[half] *= tile_.gate(branch, i);
          if (all_.lse[branch] != nullptr && tile_.exists(i) && tile_.lane % 4 == 0) {
            all_.lse[branch][tile_.statistic_at(i)] = own[half] * kLn2;
          }
        }
        logarithm[i] = own[half] == tile::minus_infinity() ? 0.0f : own[half];
      }
      if (has_gate) add_result(r, factor);
    }
  }
  __device__ __forceinline__ void add_result(int r, const float (&factor)[2]) {
    const float(&values)[kSize / 2] = sums_[r].values;
    if constexpr (kBlocks == 1) {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) total_.values[i] += values[i] * factor[i / 2 % 2];
    } else {
      float4* own = parked() + r * (kSize / 8) * kMmaThreads;
#pragma unroll
      for (int i = 0; i < kSize / 2; i += 4) {
        __syncwarp();  // one after the other: all at once would not fit into registers
        float4 sum = own[i / 4 * kMmaThreads];
        sum.x += values[i] * factor[0], sum.y += values[i + 1] * factor[0];
        sum.z += values[i + 2] * factor[1], sum.w += values[i + 3] * factor[1];
        own[i / 4 * kMmaThreads] = sum;
      }
    }
  }

  __device__ __forceinline__ void choose(const int32_t (&low)[kOwn], const int32_t (&high)[kOwn],
                                         const float (&logarithm)[kOwn]) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tile_.tokens * all_.key_blocks; i += kMmaThreads) {
      tile_.block_scores[i] = 0;
    }
    RangeSteps steps = tile_.compressed_steps();
    tile_.walk(steps, all_.compressed_key, all_.compressed_value, false, [&](const KeyStep& step, int stage) {
      if (sees_any(step, low, high)) {
        Sums<kMmaKeys> scores[kBlocks];
        multiply_rows<Element, kMmaKeys, kSize>(scores, tile_.query_rows(tile_.warp * kBlocks), tile_.key_rows(stage));
#pragma unroll
        for (int r = 0; r < kBlocks; ++r) {
          float(&values)[kMmaKeys / 2] = scores[r].values;
          hide_scores(values, step, low + 2 * r, high + 2 * r);
#pragma unroll
          for (int i = 0; i < kMmaKeys / 2; ++i) {
            values[i] = ptx::ex2_approx_ftz_f32(values[i] * scale_ - logarithm[2 * r + i / 2 % 2]);
          }
          sum_heads(tile_, values, 2 * r, arguments_.head_shift);
        }
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
      for (int half = 0; half < kOwn; ++half) {
        if (tile_.exists(half) && tile_.lane % 4 == 0) all_.lse[branch][tile_.statistic_at(half)] = nothing();
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
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // rows of queries have come, even where no branch walked
    if constexpr (kBlocks == 1) {
      tile_.store_rows(all_.output, all_.value_size, total_, 1.0f);
    } else {
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) {
        const float4* own = parked() + r * (kSize / 8) * kMmaThreads;
#pragma unroll
        for (int i = 0; i < kSize / 2; i += 4) {
          const float4 sum = own[i / 4 * kMmaThreads];
          float(&values)[kSize / 2] = sums_[r].values;
          values[i] = sum.x, values[i + 1] = sum.y, values[i + 2] = sum.z, values[i + 3] = sum.w;
        }
        tile_.store_rows(all_.output, all_.value_size, sums_[r], 1.0f, r);
      }
    }
  }

  const MmaArguments& arguments_;
  const Arguments& all_;
  Tile tile_;
  float scale_;
  Sums<kBlocks == 1 ? kSize : 0> total_;
  Sums<kSize> sums_[kBlocks];
  RunningSoftmax softmax_[kBlocks];
};

// kBlocks: of 16 rows of a warp. Two share what is read of keys; as many blocks of threads as run at once then take
// tiles one after another, so that what they park stays in the L2 cache.
template <class Element, int kSize, int kBlocks>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_forward(const __grid_constant__ MmaArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  const int32_t items = arguments.all.batch * arguments.all.key_heads * arguments.tiles;
  for (auto item = static_cast<int32_t>(blockIdx.x); item < items; item += static_cast<int32_t>(gridDim.x)) {
    MmaForward<Element, kSize, kBlocks>(arguments, shared, item).run();
    __syncthreads();  // what the tile had in shared memory is done with
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
