// What a thread of the backward does to its scores between products: probabilities, what is hidden or dropped of them,
// the operands of the next product, and dS. Rows are keys, columns queries (attention/cuda/score.cuh). sm_90.
//
// The A operand of dV, and a copy of the probabilities for dS, have a word for each two scores. The copy is more
// precise than a bf16 operand: for bf16 it is fp16, for fp16 what rounding lost. Where dS needs something else than the
// operand's probability (a derivative, or one that dropout took), the copy holds that, dropped ones with their sign
// set.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/attention/cuda/kept.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/plan.cuh"

namespace kernel_pytorch::attention {

// What a lane needs of a record: for columns 8 j + 2 c + e the value 2 j + e.
template <int kCount>
__device__ __forceinline__ void load_record(float (&values)[kCount], uint32_t address, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const ptx::Word4 words = ptx::ld_shared_v4(address + (i * 4 + lane % 4) * 16);
    values[4 * i] = __uint_as_float(words.x);
    values[4 * i + 1] = __uint_as_float(words.y);
    values[4 * i + 2] = __uint_as_float(words.z);
    values[4 * i + 3] = __uint_as_float(words.w);
  }
}

template <class T, Features kFeatures>
struct CopyWord : tile::Word<tile::Float16> {};
// A program's derivative may be of any size, for two bits more of rounding.
template <class T, Features kFeatures>
requires(kFeatures.score_mod && !kFeatures.score_mod_adds && kExponent<T> != 0) struct CopyWord<T, kFeatures>
    : tile::Word<tile::BFloat16> {
};

template <class T, Features kFeatures>
class ScoreCopy {
  using Word = CopyWord<T, kFeatures>;
  // All of the value, not what the operand lacks.
  static constexpr bool kIsWhole = has_derivative(kFeatures) || kFeatures.dropout || kExponent<T> != 0;

 public:
  static __device__ __forceinline__ uint32_t of(float low, float high, uint32_t operand) {
    float values[2] = {low, high};
    if constexpr (!kIsWhole) {
      float rounded[2];
      Word::unpack(operand, rounded);
      values[0] -= rounded[0];
      values[1] -= rounded[1];
    }
    return Word::pack(values);
  }
  static __device__ __forceinline__ void restore(float (&values)[2], uint32_t copy, uint32_t operand) {
    Word::unpack(copy, values);
    if constexpr (!kIsWhole) {
      float rounded[2];
      Word::unpack(operand, rounded);
      values[0] += rounded[0];
      values[1] += rounded[1];
    }
  }
};

// Products to probabilities; copies too where they hold derivatives.
template <class T, Features kFeatures, int kScores>
__device__ __forceinline__ void take_exponentials(float (&scores)[kScores], uint32_t (&copies)[kScores / 2],
                                                  const float (&bounds)[kScores / 2], const ScoreArguments& arguments,
                                                  const Head& head, Place place) {
  if constexpr (!changes_scores(kFeatures)) {
    const float scale = arguments.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, bounds[i / 4 * 2 + i % 2]));
    }
  } else {
    constexpr Toward kToward = has_derivative(kFeatures) ? Toward::kProduct : Toward::kNothing;
    const AlibiDistance<kFeatures> distance(head, place);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      float derivatives[2];
      change_pair<kFeatures, T, Rows::kKeys, kToward>(scores + i, derivatives, i, arguments, head, place, distance);
      scores[i] = ptx::ex2_approx_ftz_f32(scores[i] + bounds[i / 4 * 2]);
      scores[i + 1] = ptx::ex2_approx_ftz_f32(scores[i + 1] + bounds[i / 4 * 2 + 1]);
      if constexpr (has_derivative(kFeatures)) {
        copies[i / 2] = ScoreCopy<T, kFeatures>::of(scores[i] * derivatives[0], scores[i + 1] * derivatives[1], 0);
      }
    }
  }
}

// Zeros in what is not kept. Not while a product is under way that these registers belong to.
template <Features kFeatures, int kScores>
__device__ __forceinline__ void hide_scores(float (&scores)[kScores], uint32_t (&copies)[kScores / 2],
                                            const Kept<kScores>& kept) {
  hide(scores, kept, 0.0f);
  if constexpr (has_derivative(kFeatures)) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      copies[i] &= (kept.at(2 * i) ? 0xffffu : 0) | (kept.at(2 * i + 1) ? 0xffff0000u : 0);
    }
  }
}

template <class T, Features kFeatures, int kScores>
__device__ __forceinline__ void make_operand(uint32_t (&operand)[kScores / 2], uint32_t (&copies)[kScores / 2],
                                             const float (&scores)[kScores], const ScoreArguments& arguments,
                                             const Head& head, Place place) {
  Kept<kScores> kept{};
  if constexpr (kFeatures.dropout) {
    kept = kept_by_dropout<Rows::kKeys, kScores>(load_dropout<kFeatures>(arguments, head), place);
  }
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    const float low = scores[2 * i], high = scores[2 * i + 1];
    const float pair[2] = {low, high};
    operand[i] = tile::Word<T>::pack(pair);
    if constexpr (!has_derivative(kFeatures)) copies[i] = ScoreCopy<T, kFeatures>::of(low, high, operand[i]);
    if constexpr (kFeatures.dropout) {
      const uint32_t dropped = (kept.at(2 * i) ? 0 : 0xffffu) | (kept.at(2 * i + 1) ? 0 : 0xffff0000u);
      operand[i] &= ~dropped;
      copies[i] |= dropped & 0x80008000u;
    }
  }
}

// The two events of a step's scores: the end of their own product, and the end of the product that overlaps it.
template <class T, Features kFeatures, BackwardTile kTile>
struct StepScores {
  static constexpr int kScores = kTile.queries / 2;
  const BackwardArguments& arguments;
  const BackwardWork& work;
  int row, lane;  // row of the warp, in the block

  __device__ __forceinline__ Head head_of(const BackwardStep& step) const {
    return head_of_member<kFeatures>(arguments.score, work.head, step.member);
  }
  __device__ __forceinline__ Place place_of(const BackwardStep& step) const {
    return {step.tile * kTile.queries + lane % 4 * 2, work.first_key + row + lane / 4};
  }
  // What an edge keeps: found while the product of its scores still runs where bounds alone decide, else when products
  // are done and have left their registers.
  static constexpr bool kFindsEarly = masks_early(kFeatures) && !kFeatures.segments && kTile.queries == 64;
  __device__ __forceinline__ Kept<kScores> kept_early(const BackwardStep& step) const {
    Kept<kScores> kept{};
    if constexpr (kFindsEarly) {
      if (step.is_edge) kept = kept_in_bounds<kFeatures, Rows::kKeys, kScores>(head_of(step), place_of(step));
      ptx::tie_registers(kept.words[0]);
      ptx::tie_registers(kept.words[1]);
    }
    return kept;
  }
  __device__ __forceinline__ Kept<kScores> kept_late(const BackwardStep& step) const {
    if constexpr (compares_ranges(kFeatures)) {
      const SegmentRange ranges[1] = {work.ranges[&step - work.ring]};
      if (ranges[0].split != 0) {
        Kept<kScores> kept = kept_in_bounds<kFeatures, Rows::kKeys, kScores>(head_of(step), place_of(step));
        if (!step.skips_segments) {
          keep_segments_by_ranges<Rows::kKeys>(kept, arguments.score, head_of(step), place_of(step), ranges);
        }
        return kept;
      }
    }
    return kept_scores<kFeatures, Rows::kKeys, kScores>(arguments.score, head_of(step), place_of(step),
                                                        step.skips_program, step.skips_segments);
  }
  __device__ __forceinline__ void exponentials(float (&scores)[kScores], uint32_t (&copies)[kScores / 2],
                                               const float (&bounds)[kScores / 2], const BackwardStep& step) const {
    take_exponentials<T, kFeatures>(scores, copies, bounds, arguments.score, head_of(step), place_of(step));
  }
  __device__ __forceinline__ void operands(uint32_t (&operand)[kScores / 2], uint32_t (&copies)[kScores / 2],
                                           float (&scores)[kScores], const BackwardStep& step,
                                           const Kept<kScores>& early) const {
    if (step.is_edge) hide_scores<kFeatures>(scores, copies, kFindsEarly ? early : kept_late(step));
    make_operand<T, kFeatures>(operand, copies, scores, arguments.score, head_of(step), place_of(step));
  }
};

// dS = P (dP - delta) from dP - delta, or under dropout from dP, of which what is kept counts dropout_scale.
template <class T, Features kFeatures, int kScores>
__device__ __forceinline__ void differentiate(float (&scores)[kScores], const uint32_t (&operand)[kScores / 2],
                                              const uint32_t (&copies)[kScores / 2], const float (&deltas)[kScores / 2],
                                              const ScoreArguments& arguments) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) {
    float factors[2];
    ScoreCopy<T, kFeatures>::restore(factors, copies[i], operand[i]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if constexpr (kFeatures.dropout) {
        const bool dropped = (copies[i] & (e == 0 ? 0x8000u : 0x80000000u)) != 0;
        const float kept = dropped ? 0.0f : scores[2 * i + e] * arguments.dropout_scale;
        scores[2 * i + e] = fabsf(factors[e]) * (kept + deltas[i / 2 * 2 + e]);
      } else {
        scores[2 * i + e] *= factors[e];
      }
    }
  }
}

// dS as 16-bit pairs: word 2 j + h holds key row lane / 4 + 8 h, queries 8 j + 2 c and the next. Stored with the keys'
// rows 128 bytes apart and the lane's 16 queries side by side: a permutation of the tile's queries that its sums keep
// (sum_query).
template <int kWords>
__device__ __forceinline__ void store_scores(uint32_t destination, const uint32_t (&words)[kWords], int row, int lane) {
#pragma unroll
  for (int chunk = 0; chunk < kWords / 16; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const uint32_t* first = words + chunk * 16 + unit * 8 + half;
        const uint32_t offset = tile::swizzled_offset(row + 8 * half, lane % 4 * 2 + unit);
        ptx::st_shared_v4(destination + chunk * (128 * 128) + offset, {first[0], first[2], first[4], first[6]});
      }
    }
  }
}

}  // namespace kernel_pytorch::attention
