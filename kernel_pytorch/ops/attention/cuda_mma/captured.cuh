// Gradients of what a score program captured: the walk of the gradient of queries again, each score's gradient handed
// to the program's own derivatives, whose addends are summed over as much of a warp as their index does not vary by.
#pragma once

#include "kernel_pytorch/ops/attention/cuda_mma/backward.cuh"

namespace kernel_pytorch::attention {

inline constexpr int kSummedLoads = 8;  // loads whose index is the same for a whole head wait in registers

// What one unit of a whole-number sum is worth.
__device__ __forceinline__ double unit_of(const MmaCapturedArguments& arguments, int capture) {
  const float largest = __int_as_float(arguments.largest[capture]);
  return largest == 0.0f ? 1.0 : ldexp(1.0, ilogbf(largest) + 1 + arguments.addend_bits - 62);
}

class CapturedSums {
 public:
  __device__ __forceinline__ explicit CapturedSums(const MmaCapturedArguments& arguments) : arguments_(arguments) {}

  // Called by a whole warp at once, for the same element of each thread's scores.
  template <class Load>
  __device__ __forceinline__ void operator()(Load, int64_t offset, float value) {
    constexpr int kCapture = Load::kCapture, kNumber = Load::kNumber;
    if (arguments_.backward.scores.captured[kCapture].gradient == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (!Load::kVariesByQuery && !Load::kVariesByKey && kNumber < kSummedLoads) {
      sums_[kNumber] += value;
      offsets_[kNumber] = offset;
      captures_[kNumber] = kCapture;
    } else if constexpr (!Load::kVariesByQuery) {
      add(kCapture, offset, sum_lanes<16, 4>(value), lane < 4);
    } else if constexpr (!Load::kVariesByKey) {
      add(kCapture, offset, sum_lanes<2, 1>(value), lane % 4 == 0);
    } else {
      add(kCapture, offset, value, true);
    }
  }

  // At the end of a head.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kSummedLoads; ++i) {
      if (captures_[i] >= 0) add(captures_[i], offsets_[i], sum_lanes<16, 1>(sums_[i]), threadIdx.x % 32 == 0);
    }
  }

 private:
  template <int kFrom, int kTo>
  __device__ __forceinline__ static float sum_lanes(float value) {
    for (int distance = kFrom; distance >= kTo; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }

  __device__ __forceinline__ void add(int capture, int64_t offset, float value, bool is_mine) const {
    if (!is_mine || value == 0.0f) return;
    if (arguments_.mode == CapturedMode::kFloats) {
      atomicAdd(arguments_.backward.scores.captured[capture].gradient + offset, value);
    } else if (arguments_.mode == CapturedMode::kMeasure) {
      atomicMax(arguments_.largest + capture, __float_as_int(fabsf(value)));
    } else {
      const int64_t units = __double2ll_rn(static_cast<double>(value) / unit_of(arguments_, capture));
      atomicAdd(reinterpret_cast<uint64_t*>(arguments_.sums[capture]) + offset, static_cast<uint64_t>(units));
    }
  }

  const MmaCapturedArguments& arguments_;
  float sums_[kSummedLoads] = {};
  int64_t offsets_[kSummedLoads] = {};
  int captures_[kSummedLoads] = {-1, -1, -1, -1, -1, -1, -1, -1};
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
class MmaCaptured : MmaBackward<kFeatures, Element, kTile, kVectors, Of::kQueries> {
  using Base = MmaBackward<kFeatures, Element, kTile, kVectors, Of::kQueries>;
  static constexpr int kRows = rows_of(kTile), kKeys = kTile.columns;

 public:
  __device__ __forceinline__ MmaCaptured(const MmaCapturedArguments& arguments, char* shared)
      : Base(arguments.backward, shared), captured_(arguments) {}

  __device__ __forceinline__ void run() {
    this->find_tile();
    const Head& head = this->head_;
    if (this->first_row_ >= head.queries || this->first_column_ != 0) return;  // slices of columns have no meaning here
    const Walk<kFeatures, true, kRows, kKeys> walk(captured_.backward.scores, head, this->first_row_);
    const DropoutKey dropout = load_dropout<kFeatures>(captured_.backward.scores, head);
    CapturedSums sums(captured_);
    this->load_rows();
    this->load_row_statistics();
    for (int32_t i = 0; i < walk.count(); ++i) {
      const Step step = walk.at(i);
      __syncthreads();  // everyone is done with the tile before
      this->load_columns(step.first, 0);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      add_tile(step, dropout, sums);
    }
    ptx::cp_async_wait_group<0>();
    sums.flush();
  }

 private:
  __device__ __forceinline__ void add_tile(const Step& step, const DropoutKey& dropout, CapturedSums& sums) {
    const Head& head = this->head_;
    const ScoreArguments& scores = captured_.backward.scores;
    Accumulator<kKeys> probabilities, grads;
    float program_scores[kKeys / 2];
    this->template score_gradients<Toward::kCaptured>(probabilities, grads, program_scores, step, 0, dropout);
    const Place place = place_of_thread<Rows::kQueries>(this->first_row_, step.first, this->warp_row());
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int32_t query = place.query + query_step<Rows::kQueries>(i), key = place.key + key_step<Rows::kQueries>(i);
      const float grad = query < head.queries && probabilities.values[i] != 0.0f ? grads.values[i] : 0.0f;
      generated::score_mod_gradient(program_scores[i], head.batch, head.head, query + scores.part_query,
                                    key + scores.part_key, scores.captured, grad, sums);
    }
  }

  const MmaCapturedArguments& captured_;
};

template <Features kFeatures, class Element, MmaTile kTile, bool kVectors>
__global__ void __launch_bounds__(kTile.warps * 32, 1)
    mma_backward_captured(const __grid_constant__ MmaCapturedArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaCaptured<kFeatures, Element, kTile, kVectors>(arguments, shared).run();
}

// Whole-number sums as floats: blockIdx.y is the captured tensor.
__global__ void captured_sums(const __grid_constant__ MmaCapturedArguments arguments) {
  const int capture = static_cast<int>(blockIdx.y);
  float* gradient = arguments.backward.scores.captured[capture].gradient;
  if (gradient == nullptr) return;
  const double unit = unit_of(arguments, capture);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < arguments.counts[capture];
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    gradient[i] = static_cast<float>(static_cast<double>(arguments.sums[capture][i]) * unit);
  }
}

}  // namespace kernel_pytorch::attention
