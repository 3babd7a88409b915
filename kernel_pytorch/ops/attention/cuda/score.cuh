// What happens between the two products, on the scores that a thread holds: changes of scores (scale, softcap, bias,
// ALiBi, a program), their derivatives, and which scores are kept (bounds, lengths, segments, mask, a program,
// dropout).
//
// A warp's scores are as tensor cores leave them, mma.m16n8 and wgmma alike: element i of a thread is at row
// lane / 4 + 8 * (i / 2 % 2) and column 2 * (lane % 4) + 8 * (i / 4) + i % 2. Rows are queries (Q K^T), or keys (K
// Q^T). A thread passes the query and key of its element 0. Tiles begin at multiples of 16 rows and columns of the
// sequence.
//
// A tile that is no edge (attention/cuda/walk.cuh) needs change_scores alone; an edge also hide(kept_scores).
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/program.cuh"

namespace kernel_pytorch::attention {

enum class Rows : uint8_t { kQueries, kKeys };

// The thread's position in a tile that begins at (query, key); `row` is the warp's first row in it.
template <Rows kRows>
__device__ __forceinline__ Place place_of_thread(int32_t query, int32_t key, int32_t row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t row_step = row + lane / 4, column_step = lane % 4 * 2;
  return kRows == Rows::kQueries ? Place{query + row_step, key + column_step}
                                 : Place{query + column_step, key + row_step};
}

template <Rows kRows>
__device__ __forceinline__ constexpr int32_t query_step(int i) {
  return kRows == Rows::kQueries ? i / 2 % 2 * 8 : i / 4 * 8 + i % 2;
}
template <Rows kRows>
__device__ __forceinline__ constexpr int32_t key_step(int i) {
  return kRows == Rows::kKeys ? i / 2 % 2 * 8 : i / 4 * 8 + i % 2;
}

// What the product must be multiplied by inside the exponential: 1 where change_scores has done it.
template <Features kFeatures>
__device__ __forceinline__ float exponent_scale(const ScoreArguments& arguments) {
  return changes_scores(kFeatures) ? 1.0f : arguments.scale * kLog2e;
}

template <bool kIsFloat, class Element>
struct BiasElement {
  using Type = Element;
};
template <class Element>
struct BiasElement<true, Element> {
  using Type = float;
};

// The bias of elements i and i + 1 (i even). Indices beyond the tensor become its last ones: such scores are hidden, or
// never stored.
template <Features kFeatures, class Element, Rows kRows>
__device__ __forceinline__ void load_bias_pair(const ScoreArguments& arguments, const Head& head, int32_t query,
                                               int32_t key, float (&bias)[2]) {
  using Bias = typename BiasElement<kFeatures.float_bias, Element>::Type;
  const ScoreTensor& tensor = arguments.bias;
  const Bias* const base = static_cast<const Bias*>(tensor.data) + head.batch * tensor.batch + head.head * tensor.head;
  const Bias* const row = base + least(query, arguments.queries - 1) * tensor.query;
  if constexpr (kRows == Rows::kKeys) {
    const Bias* const next = base + least(query + 1, arguments.queries - 1) * tensor.query;
    const int32_t column = least(key, arguments.keys - 1);
    bias[0] = tile::to_float(row[column]);
    bias[1] = tile::to_float(next[column]);
  } else if constexpr (!kFeatures.bias_pairs) {
    bias[0] = tile::to_float(row[least(key, arguments.keys - 1)]);
    bias[1] = tile::to_float(row[least(key + 1, arguments.keys - 1)]);
  } else if constexpr (kFeatures.float_bias) {
    const uint64_t both = *reinterpret_cast<const uint64_t*>(row + least(key, arguments.keys - 2));
    bias[0] = __uint_as_float(static_cast<uint32_t>(both));
    bias[1] = __uint_as_float(static_cast<uint32_t>(both >> 32));
  } else {
    tile::Word<Element>::unpack(*reinterpret_cast<const uint32_t*>(row + least(key, arguments.keys - 2)), bias);
  }
}

// Which derivative of a score a backward wants: to the scaled product, to the bias; or the score that the program got,
// from which the program finds its own derivatives to what it captured.
enum class Toward : uint8_t { kNothing, kProduct, kBias, kCaptured };

template <Features kFeatures>
__device__ __forceinline__ float softcap_tanh(float x) {
  if constexpr (kFeatures.float_tanh) return tanhf(x);
  if constexpr (!kFeatures.exact_tanh) return ptx::tanh_approx_f32(x);
  return 1.0f - 2.0f * ptx::rcp_approx_ftz_f32(1.0f + ptx::ex2_approx_ftz_f32(x * (2.0f * kLog2e)));
}

// From a product to its score in base 2. `distance` is that of ALiBi, times the slope where it is one-sided.
template <Features kFeatures, Toward kToward>
__device__ __forceinline__ float change_score(float product, float& derivative, const ScoreArguments& arguments,
                                              const Head& head, Place place, float bias, float distance) {
  float score;
  derivative = 1.0f;
  if constexpr (kFeatures.softcap) {
    const float ratio = softcap_tanh<kFeatures>(product * (arguments.scale * arguments.softcap_reciprocal));
    score = ratio * (arguments.softcap * kLog2e);
    if constexpr (kToward == Toward::kProduct) derivative = 1.0f - ratio * ratio;
  } else {
    score = product * (arguments.scale * kLog2e);
  }
  if constexpr (has_bias(kFeatures)) score += bias * kLog2e;
  if constexpr (kFeatures.alibi) score -= kFeatures.alibi_is_one_sided ? distance : fabsf(distance) * head.slope;
  if constexpr (kFeatures.softcap_after) {
    const float ratio = softcap_tanh<kFeatures>(score * (kLn2 * arguments.softcap_reciprocal));
    if constexpr (kToward != Toward::kNothing) derivative *= 1.0f - ratio * ratio;
    score = score == tile::minus_infinity() ? score : ratio * (arguments.softcap * kLog2e);
  }
  if constexpr (kFeatures.score_mod) {
    const float natural = score * kLn2;
    if constexpr (kToward == Toward::kCaptured) {
      derivative = natural;
    } else if constexpr (kToward != Toward::kNothing) {
      derivative *= score_program_derivative(natural, arguments, head, place);
    }
    score = score_program(natural, arguments, head, place) * kLog2e;
  }
  return score;
}

// One-sided ALiBi is slope * (query + offset - key): a constant of the thread and a multiple of the slope.
template <Features kFeatures>
struct AlibiDistance {
  float unit, first;  // first: of the thread's element 0

  __device__ __forceinline__ AlibiDistance(const Head& head, Place place)
      : unit(kFeatures.alibi_is_one_sided ? head.slope : 1.0f),
        first(kFeatures.alibi ? unit * static_cast<float>(place.query + head.offset - place.key) : 0.0f) {}
};

// Elements i and i + 1 (i even) of a thread's products become scores in base 2, ready for exp2(score - reference), with
// their derivatives where wanted.
template <Features kFeatures, class Element, Rows kRows, Toward kToward>
__device__ __forceinline__ void change_pair(float* pair, float* derivatives, int i, const ScoreArguments& arguments,
                                            const Head& head, Place place, const AlibiDistance<kFeatures>& distance) {
  float bias[2] = {};
  if constexpr (has_bias(kFeatures)) {
    load_bias_pair<kFeatures, Element, kRows>(arguments, head, place.query + query_step<kRows>(i),
                                              place.key + key_step<kRows>(i), bias);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t query = query_step<kRows>(i + j), key = key_step<kRows>(i + j);
    pair[j] = change_score<kFeatures, kToward>(pair[j], derivatives[j], arguments, head,
                                               {place.query + query, place.key + key}, bias[j],
                                               distance.first + distance.unit * static_cast<float>(query - key));
  }
}

template <Features kFeatures, class Element, Rows kRows, Toward kToward, int kCount>
__device__ __forceinline__ void change_and_derive_scores(float (&scores)[kCount], float (&derivatives)[kCount],
                                                         const ScoreArguments& arguments, const Head& head,
                                                         Place place) {
  const AlibiDistance<kFeatures> distance(head, place);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    change_pair<kFeatures, Element, kRows, kToward>(scores + i, derivatives + i, i, arguments, head, place, distance);
  }
}

template <Features kFeatures, class Element, Rows kRows, int kCount>
__device__ __forceinline__ void change_scores(float (&scores)[kCount], const ScoreArguments& arguments,
                                              const Head& head, Place place) {
  if constexpr (changes_scores(kFeatures)) {
    float unused[kCount];
    change_and_derive_scores<kFeatures, Element, kRows, Toward::kNothing>(scores, unused, arguments, head, place);
  }
}

}  // namespace kernel_pytorch::attention
