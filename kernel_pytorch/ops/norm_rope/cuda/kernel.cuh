// RMS norm of heads and their rotation, one pass over memory: a head stays in the registers of a few lanes, which sum
// by shuffles. cos, sin and weight are brought to registers once for several heads of a token. Backward computes the
// statistics again; a group of lanes owns the same columns of every head, so that the weight's gradient is a plain sum
// in registers. Each block writes one partial row, and the rows are added in their order: the result repeats bit for
// bit.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/norm_rope/cuda/arguments_cuda.h"

namespace kernel_pytorch::norm_rope {

template <class T>
__device__ __forceinline__ void load_floats(const void* address, bool is_float, bool wanted, int column,
                                            float (&values)[tile::Vector<T>::kCount]) {
  constexpr int kCount = tile::Vector<T>::kCount;
  if (is_float) {
    const float* from = static_cast<const float*>(address) + column;
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) {
      tile::load_shared_by_all_if<float>(wanted, from + part * 4)
          .unpack(reinterpret_cast<float(&)[4]>(values[part * 4]));
    }
  } else {
    tile::load_shared_by_all_if<T>(wanted, static_cast<const T*>(address) + column).unpack(values);
  }
}

// The vectors of a head that a lane owns: a pair of partners, then those that are not turned.
template <class T, HeadConfig kConfig>
struct Columns {
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr int kVectors = kConfig.rest ? 4 : 2;
  int column[kVectors];
  bool owned[kVectors];

  __device__ __forceinline__ Columns(const Arguments& arguments, int lane) {
    column[0] = lane * kCount;
    column[1] = arguments.pairs + lane * kCount;
    owned[0] = owned[1] = column[0] < arguments.pairs;
    if constexpr (kConfig.rest) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        column[2 + i] = 2 * arguments.pairs + (i * kConfig.lanes + lane) * kCount;
        owned[2 + i] = column[2 + i] < arguments.head_dim;
      }
    }
  }
};

template <class T, HeadConfig kConfig>
struct Group {
  using Own = Columns<T, kConfig>;
  static constexpr int kCount = Own::kCount;
  static constexpr int kVectors = Own::kVectors;
  const Arguments& arguments;
  Own own;
  float scale[kVectors][kCount];  // weight + offset
  float cosine[kCount], sine[kCount];

  __device__ __forceinline__ explicit Group(const Arguments& given)
      : arguments(given), own(given, threadIdx.x % kConfig.lanes) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool wanted = own.owned[i] && arguments.weight != nullptr;
      load_floats<T>(arguments.weight, arguments.weight_is_float, wanted, own.column[i], scale[i]);
#pragma unroll
      for (float& value : scale[i]) value = arguments.weight == nullptr ? 1.0f : value + arguments.weight_offset;
    }
  }

  // Goes to a group of heads: `wanted` says whether there is one.
  uint32_t first_head;
  int64_t batch, place;
  __device__ __forceinline__ void go_to(uint32_t item, bool wanted) {
    const uint32_t token = divide(item, arguments.head_groups);
    first_head = (item - token * arguments.head_groups.divisor) * kConfig.heads;
    batch = divide(token, arguments.sequence);
    place = token - batch * arguments.sequence.divisor;
    const bool turns = wanted && own.owned[0];
    load_floats<T>(row_of(arguments.cos), arguments.table_is_float, turns, own.column[0], cosine);
    load_floats<T>(row_of(arguments.sin), arguments.table_is_float, turns, own.column[0], sine);
  }
  __device__ __forceinline__ const char* row_of(const Table& table) const {
    return static_cast<const char*>(table.data) + batch * table.strides[0] + place * table.strides[1];
  }
  __device__ __forceinline__ char* head_of(const HeadTensor& tensor, int head) const {
    return static_cast<char*>(tensor.data) + batch * tensor.strides[0] + place * tensor.strides[1] +
           (first_head + head) * tensor.strides[2];
  }
  __device__ __forceinline__ bool has(int head) const {
    return first_head + head < arguments.heads;
  }

  __device__ __forceinline__ void load(const HeadTensor& tensor, int head, bool wanted,
                                       tile::Vector<T> (&vectors)[kVectors]) const {
    const T* start = reinterpret_cast<const T*>(head_of(tensor, head));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = tile::load_once_if<T>(wanted && own.owned[i] && has(head), start + own.column[i]);
    }
  }
  __device__ __forceinline__ void store(const HeadTensor& tensor, int head, bool wanted, int i,
                                        const float (&values)[kCount]) const {
    T* start = reinterpret_cast<T*>(head_of(tensor, head));
    tile::store_if(wanted && own.owned[i] && has(head), start + own.column[i], tile::Vector<T>::pack(values));
  }
  // `direction`: 1 turns, -1 turns back.
  __device__ __forceinline__ void turn(float (&first)[kCount], float (&second)[kCount], float direction) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float a = first[k], b = second[k], s = sine[k] * direction;
      first[k] = a * cosine[k] - b * s;
      second[k] = b * cosine[k] + a * s;
    }
  }
};

template <class T, HeadConfig kConfig>
__global__ void __launch_bounds__(kThreads) forward_heads(const __grid_constant__ Arguments arguments) {
  static_assert(is_legal(kConfig));
  using Heads = Group<T, kConfig>;
  constexpr int kCount = Heads::kCount, kVectors = Heads::kVectors;
  tile::follow_closely();
  Heads group(arguments);
  const uint32_t item = (blockIdx.x * kThreads + threadIdx.x) / kConfig.lanes;
  const bool wanted = item < arguments.items;
  group.go_to(wanted ? item : 0, wanted);
  tile::Vector<T> loaded[kConfig.heads][kVectors];
#pragma unroll
  for (int head = 0; head < kConfig.heads; ++head) group.load(arguments.x, head, wanted, loaded[head]);
  const float per_column = 1.0f / static_cast<float>(arguments.head_dim);
#pragma unroll
  for (int head = 0; head < kConfig.heads; ++head) {
    float values[kVectors][kCount], squares = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      loaded[head][i].unpack(values[i]);
#pragma unroll
      for (float value : values[i]) squares += value * value;
    }
    squares = tile::sum_lanes<kConfig.lanes>(squares);
    const float rstd = rsqrtf(squares * per_column + arguments.eps);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) values[i][k] *= rstd * group.scale[i][k];
    }
    group.turn(values[0], values[1], 1.0f);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) group.store(arguments.output, head, wanted, i, values[i]);
  }
}

// The groups of a warp add their column sums by shuffles, the warps of a block in their order.
template <class T, HeadConfig kConfig>
__device__ __forceinline__ void store_partial(const Group<T, kConfig>& group,
                                              float (&sums)[Group<T, kConfig>::kVectors][Group<T, kConfig>::kCount]) {
  extern __shared__ float shared[];
  constexpr int kVectors = Group<T, kConfig>::kVectors, kCount = Group<T, kConfig>::kCount;
  const Arguments& arguments = group.arguments;
#pragma unroll
  for (int distance = kConfig.lanes; distance < tile::kWarpLanes; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[i][k] += __shfl_xor_sync(0xffffffffu, sums[i][k], distance);
    }
  }
  const int warp = threadIdx.x / tile::kWarpLanes;
  const bool is_first = threadIdx.x % tile::kWarpLanes < kConfig.lanes;
  for (int turn = 0; turn < kThreads / tile::kWarpLanes; ++turn) {
    if (turn > 0) __syncthreads();
    if (turn != warp || !is_first) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!group.own.owned[i]) continue;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        float& place = shared[group.own.column[i] + k];
        place = turn == 0 ? sums[i][k] : place + sums[i][k];
      }
    }
  }
  __syncthreads();
  float* target = arguments.weight_partial + static_cast<int64_t>(blockIdx.x) * arguments.head_dim;
  for (int column = threadIdx.x; column < arguments.head_dim; column += kThreads) target[column] = shared[column];
}

template <class T, HeadConfig kConfig>
__global__ void __launch_bounds__(kThreads) backward_heads(const __grid_constant__ Arguments arguments) {
  static_assert(is_legal(kConfig));
  using Heads = Group<T, kConfig>;
  constexpr int kCount = Heads::kCount, kVectors = Heads::kVectors;
  tile::let_next_kernel_start();
  Heads group(arguments);
  float sums[kVectors][kCount] = {};
  const float per_column = 1.0f / static_cast<float>(arguments.head_dim);
  const uint32_t groups = kThreads / kConfig.lanes, step = gridDim.x * groups;
  // Lanes of a warp go round together, since they sum together.
  for (uint32_t first = blockIdx.x * groups; first < arguments.items; first += step) {
    const uint32_t item = first + threadIdx.x / kConfig.lanes;
    const bool wanted = item < arguments.items;
    group.go_to(wanted ? item : 0, wanted);
    tile::Vector<T> loaded[kConfig.heads][2][kVectors];
#pragma unroll
    for (int head = 0; head < kConfig.heads; ++head) {
      group.load(arguments.x, head, wanted, loaded[head][0]);
      group.load(arguments.grad_output, head, wanted, loaded[head][1]);
    }
#pragma unroll
    for (int head = 0; head < kConfig.heads; ++head) {
      float x[kVectors][kCount], gradient[kVectors][kCount];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        loaded[head][0][i].unpack(x[i]);
        loaded[head][1][i].unpack(gradient[i]);
      }
      group.turn(gradient[0], gradient[1], -1.0f);
      float squares = 0, along = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          squares += x[i][k] * x[i][k];
          along += gradient[i][k] * group.scale[i][k] * x[i][k];
        }
      }
      squares = tile::sum_lanes<kConfig.lanes>(squares);
      along = tile::sum_lanes<kConfig.lanes>(along);
      const float rstd = rsqrtf(squares * per_column + arguments.eps);
      const float slope = along * rstd * rstd * per_column;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          sums[i][k] += gradient[i][k] * (x[i][k] * rstd);
          gradient[i][k] = rstd * (gradient[i][k] * group.scale[i][k] - x[i][k] * slope);
        }
        if (arguments.output.data != nullptr) group.store(arguments.output, head, wanted, i, gradient[i]);
      }
    }
  }
  if (arguments.weight_partial != nullptr) store_partial(group, sums);
}

}  // namespace kernel_pytorch::norm_rope
