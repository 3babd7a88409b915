// Scores by FMA in float, a key for each thread: any type, size and stride. sm_80; FP8 sm_89.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/lightning_indexer/cuda/choose.cuh"

namespace kernel_pytorch::lightning_indexer {

template <class T>
class FmaScorer {
 public:
  static constexpr int32_t kKeys = kThreads;
  static __device__ __forceinline__ int64_t shared_bytes(const Arguments&) { return 0; }

  __device__ __forceinline__ FmaScorer(const Arguments& a, char*, int32_t batch, int32_t first_query, int32_t)
      : a_(a), batch_(batch), first_query_(first_query) {}

  __device__ __forceinline__ void load_keys(int32_t base, int32_t end) {
    key_ = base + static_cast<int32_t>(threadIdx.x);
    row_ = nullptr;
    if (key_ >= end) return;
    const Place place = place_of(a_, batch_, key_);
    if (!place.is_there) return;
    row_ = static_cast<const T*>(a_.key) + place.first * a_.key_first + place.second * a_.key_second;
    scale_ =
        a_.key_scale == nullptr ? 1.0f : a_.key_scale[place.first * a_.scale_first + place.second * a_.scale_second];
  }
  __device__ __forceinline__ int32_t key() const { return key_; }
  __device__ __forceinline__ bool has_key() const { return row_ != nullptr; }

  __device__ __forceinline__ float score(int32_t query) const {
    if (row_ == nullptr) return 0;
    constexpr int kHeads = 4;  // at once, for one read of the key
    const int64_t token = first_query_ + query;
    const T* rows = static_cast<const T*>(a_.query) + batch_ * a_.query_batch + token * a_.query_token;
    const float* weights = a_.weights + batch_ * a_.weights_batch + token * a_.weights_token;
    float score = 0;
    for (int32_t head = 0; head < a_.heads; head += kHeads) {
      float dots[kHeads] = {};
      for (int32_t i = 0; i < a_.size; ++i) {
        const float element = tile::to_float(row_[i]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (head + h < a_.heads) dots[h] += tile::to_float(rows[(head + h) * a_.query_head + i]) * element;
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        // A NaN stays one.
        if (head + h < a_.heads) score += weights[(head + h) * a_.weights_head] * (dots[h] < 0.0f ? 0.0f : dots[h]);
      }
    }
    return score * scale_;
  }

 private:
  const Arguments& a_;
  int32_t batch_, first_query_, key_ = 0;
  const T* row_ = nullptr;
  float scale_ = 1.0f;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4) choose_by_fma(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char shared[];
  choose_keys<FmaScorer<T>>(a, shared);
}

}  // namespace kernel_pytorch::lightning_indexer
