// Softmax of rows on the lanes of the CPU, built once per instruction level. A row comes from memory once: its scores
// and then its exponentials wait in a buffer of the nearest cache, and the output leaves by stores that bypass the
// caches where it is large. Rows wider than the buffer compute their exponentials twice.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/row_loops.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/softmax/softmax_rows.h"

namespace kernel_pytorch::softmax::KP_ISA_NAMESPACE {
namespace {

using cpu::Vec;

constexpr int64_t kBufferColumns = 16384;  // 64 KB on the stack
constexpr float kMinusInfinity = -__builtin_inff();

// The scores of one row.
template <class T, MaskKind kKind>
struct Scores {
  const T* x;
  const void* mask;
  float scale;

  template <class Lanes>
  KP_WORD Vec at(const Scores& row, int64_t j, Lanes lanes) {
    Vec score = cpu::load(row.x + j, lanes) * row.scale;
    if constexpr (kKind == MaskKind::kSameType) score += cpu::load(static_cast<const T*>(row.mask) + j, lanes);
    if constexpr (kKind == MaskKind::kFloat) score += cpu::load(static_cast<const float*>(row.mask) + j, lanes);
    if constexpr (kKind == MaskKind::kBool) {
      const cpu::VecU kept = load_bytes(static_cast<const uint8_t*>(row.mask) + j, lanes);
      score = cpu::select(kept != 0u, score, cpu::broadcast(kMinusInfinity));
    }
    return cpu::keep(score, lanes, kMinusInfinity);
  }

 private:
  KP_WORD cpu::VecU load_bytes(const uint8_t* from, cpu::AllLanes) {
    return cpu::widen_bits(cpu::load_storage<cpu::VecU8>(from));
  }
  KP_WORD cpu::VecU load_bytes(const uint8_t* from, cpu::SomeLanes lanes) {
    return cpu::widen_bits(cpu::load_storage_partial<cpu::VecU8, 1>(from, lanes.count));
  }
};

struct Totals {
  float largest;
  float sum;
};

// kBuffered: the buffer holds a row. On return it has the exponentials (the scores, with `log`).
template <class T, MaskKind kKind, bool kBuffered>
KP_WORD Totals reduce_row(const Scores<T, kKind>& row, int64_t columns, bool log, const T* next, float* buffer) {
  using Row = Scores<T, kKind>;
  // A float row without mask lies in the cache as it is; anything else is converted once.
  constexpr bool kKeepsScores = kBuffered && !(sizeof(T) == 4 && kKind == MaskKind::kNone);
  Vec largest[4];
  for (Vec& chain : largest) chain = cpu::broadcast(kMinusInfinity);
  cpu::for_columns_in_chains<T>(columns, [&](int64_t j, int chain, auto lanes) {
    const Vec score = Row::at(row, j, lanes);
    if constexpr (kKeepsScores) cpu::store(buffer + j, score, lanes);
    largest[chain] = cpu::max(score, largest[chain]);  // NaN is lost here and found by the sum
  });
  const float most = cpu::horizontal_max(cpu::max(cpu::max(largest[0], largest[1]), cpu::max(largest[2], largest[3])));
  const float center = most == kMinusInfinity ? 0.0f : most;
  Vec sums[4] = {};
  cpu::for_columns_in_chains<T>(columns, [&](int64_t j, int chain, auto lanes) {
    cpu::prefetch_far(next + j);
    Vec score;
    if constexpr (kKeepsScores) {
      score = cpu::keep(cpu::load(buffer + j, lanes), lanes, kMinusInfinity);
    } else {
      score = Row::at(row, j, lanes);
    }
    const Vec exponential = cpu::exp(score - center);
    sums[chain] += exponential;
    if constexpr (kBuffered) {
      if (!log) cpu::store(buffer + j, exponential, lanes);
    }
  });
  return {most, cpu::horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))};
}

template <class T, MaskKind kKind, bool kBuffered, bool kStream>
KP_WORD void write_row(const Scores<T, kKind>& row, const ForwardRows& block, Totals totals, const float* buffer,
                       T* output) {
  using Row = Scores<T, kKind>;
  constexpr bool kKeepsScores = kBuffered && !(sizeof(T) == 4 && kKind == MaskKind::kNone);
  const bool is_empty = totals.sum == 0 && block.empty_is_zero;
  const float center = totals.largest == kMinusInfinity ? 0.0f : totals.largest;
  if (block.log) {
    const float log_sum = is_empty ? 0.0f : __builtin_logf(totals.sum);
    // Without scores to remove, -inf alone must end as NaN: its logarithm of zero is -inf.
    cpu::write_columns<T, kStream>(output, block.visible, [&](int64_t j, auto lanes) {
      Vec score;
      if constexpr (kKeepsScores) {
        score = cpu::load(buffer + j, lanes);
      } else {
        score = Row::at(row, j, lanes);
      }
      return (score - center) - log_sum;
    });
    return;
  }
  const float factor = is_empty ? 0.0f : 1.0f / totals.sum;
  cpu::write_columns<T, kStream>(output, block.visible, [&](int64_t j, auto lanes) {
    if constexpr (kBuffered) {
      return cpu::load(buffer + j, lanes) * factor;
    } else {
      return cpu::exp(Row::at(row, j, lanes) - center) * factor;
    }
  });
}

template <class T, MaskKind kKind, bool kBuffered>
KP_WORD void forward_rows(const ForwardRows& block, float* buffer) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* x = static_cast<const T*>(block.x) + i * block.x_stride_elements;
    const int64_t mask_bytes = i * block.mask_stride_elements *
                               (kKind == MaskKind::kBool    ? 1
                                : kKind == MaskKind::kFloat ? int64_t{sizeof(float)}
                                                            : int64_t{sizeof(T)});
    const Scores<T, kKind> row{x, static_cast<const char*>(block.mask) + mask_bytes, block.scale};
    T* output = static_cast<T*>(block.output) + i * block.columns;
    const T* next = i + 1 < block.rows ? x + block.x_stride_elements : x;
    const Totals totals = reduce_row<T, kKind, kBuffered>(row, block.visible, block.log, next, buffer);
    if (block.stream_stores) {
      write_row<T, kKind, kBuffered, true>(row, block, totals, buffer, output);
    } else {
      write_row<T, kKind, kBuffered, false>(row, block, totals, buffer, output);
    }
    const Vec removed = cpu::broadcast(block.log ? kMinusInfinity : 0.0f);
    cpu::for_columns<T>(block.columns - block.visible,
                        [&](int64_t j, auto lanes) { cpu::store(output + block.visible + j, removed, lanes); });
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class T, MaskKind kKind>
void forward_masked(const ForwardRows& block) {
  if (block.visible <= kBufferColumns) {
    alignas(64) float buffer[kBufferColumns];
    forward_rows<T, kKind, true>(block, buffer);
  } else {
    forward_rows<T, kKind, false>(block, nullptr);
  }
}

template <class T>
void forward(const ForwardRows& block) {
  switch (block.mask_kind) {
    case MaskKind::kNone:
      return forward_masked<T, MaskKind::kNone>(block);
    case MaskKind::kBool:
      return forward_masked<T, MaskKind::kBool>(block);
    case MaskKind::kSameType:
      return forward_masked<T, MaskKind::kSameType>(block);
    case MaskKind::kFloat:
      return forward_masked<T, MaskKind::kFloat>(block);
  }
}

template <class T, bool kLog, bool kStream>
KP_WORD void backward_rows(const BackwardRows& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* gradient = static_cast<const T*>(block.grad_output) + i * block.grad_output_stride_elements;
    const T* output = static_cast<const T*>(block.output) + i * block.output_stride_elements;
    const bool is_last = i + 1 == block.rows;
    const T* next_gradient = is_last ? gradient : gradient + block.grad_output_stride_elements;
    const T* next_output = is_last ? output : output + block.output_stride_elements;
    Vec sums[4] = {};
    cpu::for_columns_in_chains<T>(block.columns, [&](int64_t j, int chain, auto lanes) {
      const Vec g = cpu::load(gradient + j, lanes);  // zeros past the end
      if constexpr (kLog) {
        sums[chain] += g;
      } else {
        sums[chain] += g * cpu::load(output + j, lanes);
      }
    });
    const float sum = cpu::horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    T* grad_input = static_cast<T*>(block.grad_input) + i * block.columns;
    cpu::write_columns<T, kStream>(grad_input, block.columns, [&](int64_t j, auto lanes) {
      cpu::prefetch_far(next_gradient + j);
      cpu::prefetch_far(next_output + j);
      const Vec g = cpu::load(gradient + j, lanes), y = cpu::load(output + j, lanes);
      if constexpr (kLog) {
        const Vec value = (g - cpu::exp(y) * sum) * block.scale;
        return block.masked ? cpu::select(y == kMinusInfinity, Vec{}, value) : value;
      } else {
        return y * (g - sum) * block.scale;
      }
    });
  }
  if (kStream) cpu::stream_fence();
}

template <class T>
void backward(const BackwardRows& block) {
  if (block.log) {
    return block.stream_stores ? backward_rows<T, true, true>(block) : backward_rows<T, true, false>(block);
  }
  return block.stream_stores ? backward_rows<T, false, true>(block) : backward_rows<T, false, false>(block);
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {
    {forward<float>, backward<float>}, {forward<BFloat16>, backward<BFloat16>}, {forward<Float16>, backward<Float16>}};

}  // namespace kernel_pytorch::softmax::KP_ISA_NAMESPACE
