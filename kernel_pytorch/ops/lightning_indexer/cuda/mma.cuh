// Scores by tensor cores: a warp multiplies 32 keys (16 where rows are longer than 128) by the heads of one query.
//
// Keys are the rows of the product, so that the sum over heads is one over its columns: in a lane's own accumulators,
// then over the four lanes of a row. They go from memory straight into fragments. A lane reads 8 neighbouring columns
// of a row at once; for the products these are columns 2 * (lane % 4) and the next of two steps and of those 8 further,
// which is another order of the columns, and the queries in shared memory are read in the same one. e4m3 becomes fp16,
// which holds each of its values: products are exact, sums float. sm_80; FP8 sm_89.
#pragma once

#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/lightning_indexer/cuda/choose.cuh"

namespace kernel_pytorch::lightning_indexer {

// Eight elements as four words of the type that is multiplied.
template <class T>
struct Eight {
  using Factor = T;
  static __device__ __forceinline__ void load(const T* from, uint32_t (&words)[4]) {
    const uint4 all = *reinterpret_cast<const uint4*>(from);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  }
};
template <>
struct Eight<tile::Float8E4M3> {
  using Factor = tile::Float16;
  static __device__ __forceinline__ void load(const tile::Float8E4M3* from, uint32_t (&words)[4]) {
    const uint2 all = *reinterpret_cast<const uint2*>(from);
    words[0] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(all.x));
    words[1] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(all.x >> 16));
    words[2] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(all.y));
    words[3] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(all.y >> 16));
  }
};

// kChunks: of 32 columns.
template <class T, int kChunks>
class MmaScorer {
  using Factor = typename Eight<T>::Factor;
  static constexpr int kTiles = kChunks <= 4 ? 2 : 1;  // of 16 keys, that a warp holds in registers

 public:
  static constexpr int32_t kKeys = kThreads / 32 * kTiles * 16;
  static __device__ __forceinline__ int64_t shared_bytes(const Arguments& a) { return query_bytes(a, kChunks); }

  // The tile's queries and weights go to shared memory; zeros behind the last column and head.
  __device__ __forceinline__ MmaScorer(const Arguments& a, char* shared, int32_t batch, int32_t first_query,
                                       int32_t queries)
      : a_(a), batch_(batch), heads_(padded_heads(a)), rows_(shared) {
    constexpr int32_t kUnits = kChunks * 4;  // of eight columns
    for (auto i = static_cast<int32_t>(threadIdx.x); i < queries * heads_ * kUnits; i += kThreads) {
      const int32_t unit = i % kUnits, head = i / kUnits % heads_, query = i / kUnits / heads_;
      uint32_t words[4] = {};
      if (head < a.heads && unit * 8 < a.size) {
        Eight<T>::load(static_cast<const T*>(a.query) + batch * a.query_batch +
                           static_cast<int64_t>(first_query + query) * a.query_token + head * a.query_head + unit * 8,
                       words);
      }
      *reinterpret_cast<uint4*>(rows_ + (query * heads_ + head) * row_bytes(kChunks) + unit * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    weights_ = reinterpret_cast<float*>(rows_ + a.tile_queries * heads_ * row_bytes(kChunks));
    for (auto i = static_cast<int32_t>(threadIdx.x); i < queries * heads_; i += kThreads) {
      const int32_t head = i % heads_, query = i / heads_;
      weights_[i] = head < a.heads
                        ? a.weights[batch * a.weights_batch +
                                    static_cast<int64_t>(first_query + query) * a.weights_token + head * a.weights_head]
                        : 0.0f;
    }
  }

  __device__ __forceinline__ void load_keys(int32_t base, int32_t end) {
    const int32_t lane = threadIdx.x % 32, first = base + static_cast<int32_t>(threadIdx.x) / 32 * kTiles * 16;
    key_ = -1, scale_ = 1.0f;
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
      const int32_t key = first + row * 8 + lane / 4;
      const Place place = key < end ? place_of(a_, batch_, key) : Place{0, 0, false};
      const T* from = static_cast<const T*>(a_.key) + place.first * a_.key_first + place.second * a_.key_second;
      if (row == lane % 4 && place.is_there) {  // of the lanes that share a row, each has the score of another one
        key_ = key;
        if (a_.key_scale != nullptr)
          scale_ = a_.key_scale[place.first * a_.scale_first + place.second * a_.scale_second];
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int32_t column = chunk * 32 + lane % 4 * 8;
        uint32_t words[4] = {};
        if (place.is_there && column < a_.size) Eight<T>::load(from + column, words);
        uint32_t(&fragments)[2][4] = keys_[row / 2][chunk];
        fragments[0][row % 2] = words[0], fragments[0][row % 2 + 2] = words[1];
        fragments[1][row % 2] = words[2], fragments[1][row % 2 + 2] = words[3];
      }
    }
  }
  __device__ __forceinline__ int32_t key() const {
    return key_;
  }
  __device__ __forceinline__ bool has_key() const {
    return key_ >= 0;
  }

  // All lanes of the warp.
  __device__ __forceinline__ float score(int32_t query) const {
    const int32_t lane = threadIdx.x % 32;
    const char* rows = rows_ + (query * heads_ + lane / 4) * row_bytes(kChunks) + lane % 4 * 16;
    const float* weights = weights_ + query * heads_ + lane % 4 * 2;
    float sums[2 * kTiles] = {};
    for (int32_t head = 0; head < heads_; head += kTileHeads) {
      float dots[2][kTiles][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 words =
              *reinterpret_cast<const uint4*>(rows + (head + half * 8) * row_bytes(kChunks) + chunk * 64);
#pragma unroll
          for (int part = 0; part < kTiles; ++part) {
            tile::multiply_fragments<Factor>(dots[half][part], keys_[part][chunk][0], words.x, words.y);
            tile::multiply_fragments<Factor>(dots[half][part], keys_[part][chunk][1], words.z, words.w);
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int32_t own = head + half * 8 + column;
          const float weight = weights[own];
          if (own + lane % 4 * 2 >= a_.heads) continue;  // 0 * inf of a padded head would be NaN
#pragma unroll
          for (int row = 0; row < 2 * kTiles; ++row) {
            const float dot = dots[half][row / 2][row % 2 * 2 + column];
            sums[row] += weight * (dot < 0.0f ? 0.0f : dot);  // a NaN stays one
          }
        }
      }
    }
    float score = 0;
#pragma unroll
    for (int row = 0; row < 2 * kTiles; ++row) {
      float sum = sums[row];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (row == lane % 4) score = sum;
    }
    return score * scale_;
  }

 private:
  const Arguments& a_;
  int32_t batch_, heads_, key_ = -1;
  float scale_ = 1.0f;
  char* rows_;
  float* weights_;
  uint32_t keys_[kTiles][kChunks][2][4];
};

template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads, 3) choose_by_mma(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char shared[];
  choose_keys<MmaScorer<T, kChunks>>(a, shared);
}

}  // namespace kernel_pytorch::lightning_indexer
