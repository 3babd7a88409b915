// Softmax of rows on the lanes of the CPU, built once per instruction level. A row comes from memory once: what the
// next pass needs waits as floats in a buffer of the caches, and the output leaves by stores that bypass them where it
// is large, while the next row is computed. Only the first and the last pass know the element type; masks, causality
// and log are choices at run time.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/row_loops.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/softmax/cpu/rows.h"

namespace kernel_pytorch::softmax::KP_ISA_NAMESPACE {
namespace {

using cpu::Vec;

constexpr float kMinusInfinity = -__builtin_inff();

struct Totals {
  float largest;
  float sum;  // of exponentials around the largest
};

KP_PRIMITIVE float center_of(float largest) {
  return largest == kMinusInfinity ? 0.0f : largest;
}

KP_PRIMITIVE float largest_of(const Vec (&chains)[2]) {
  return cpu::horizontal_max(cpu::max(chains[0], chains[1]));
}

// Significant bits of a result.
template <class T>
inline constexpr int kBitsOf = __is_same(T, BFloat16)  ? 8
                               : __is_same(T, Float16) ? 11
                                                       : 24;

template <class T>
KP_PRIMITIVE float largest_score(const T* x, int64_t columns, float scale) {
  Vec largest[2] = {cpu::broadcast(kMinusInfinity), cpu::broadcast(kMinusInfinity)};
  cpu::for_slots<T>(x, columns, [&](Vec value, int64_t, int chain, auto lanes) {
    // NaN is lost here and found by the sum
    largest[chain] = cpu::max(cpu::keep(value * scale, lanes, kMinusInfinity), largest[chain]);
  });
  return largest_of(largest);
}

// A row whose exponentials wait in a buffer, by slot, to be multiplied by `factor` and written.
template <class T>
struct Waiting {
  T* output = nullptr;  // null: none
  const float* buffer = nullptr;
  float factor = 0;
};

template <class T, bool kStream>
KP_PRIMITIVE void write_pair(const Waiting<T>& row, int64_t j) {
  const cpu::PairOf<T> pair{cpu::load(row.buffer + j) * row.factor,
                            cpu::load(row.buffer + j + cpu::kLanesOf<T>) * row.factor};
  if constexpr (kStream) {
    cpu::stream2_unordered<T, true>(row.output + j, pair);
  } else {
    cpu::store2_unordered<T, true>(row.output + j, pair);
  }
}
template <class T>
KP_PRIMITIVE void write_rest(const Waiting<T>& row, int64_t j, int64_t columns) {
  for (constexpr int kStep = cpu::kLanesOf<T>; j < columns; j += kStep) {
    const cpu::SomeLanes rest{static_cast<int>(columns - j < kStep ? columns - j : kStep)};
    cpu::store(row.output + j, cpu::load(row.buffer + j, rest) * row.factor, rest);
  }
}
template <class T, bool kStream>
KP_PRIMITIVE void write_whole(const Waiting<T>& row, int64_t columns) {
  constexpr int64_t kPair = 2 * cpu::kLanesOf<T>;
  int64_t j = 0;
  for (; j + kPair <= columns; j += kPair) write_pair<T, kStream>(row, j);
  write_rest(row, j, columns);
}

// The exponentials of a row into its buffer, and their sum. Meanwhile the row before leaves and the next one arrives,
// so that neither memory nor the lanes wait for the other.
template <class T, bool kStream>
KP_PRIMITIVE float exponentials(const T* x, const T* next, int64_t columns, float scale, float center, float* buffer,
                                const Waiting<T>& before) {
  constexpr int64_t kStep = cpu::kLanesOf<T>;
  // In this order the largest floats stay finite.
  const auto term_of = [=](Vec value) {
    const Vec units = (value * scale - center) * cpu::kExpUnit;
    // Powers of two have a longer polynomial: with the shorter one errors were 1.4 times torch's.
    if constexpr (kBitsOf<T> == 24 && cpu::kExpUnit != 1.0f) return cpu::exp2_fast(units);
    return cpu::exp_of_units<kBitsOf<T>>(units);
  };
  Vec sums[2] = {};
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    for (int64_t line = 0; line < int64_t{2 * kStep * sizeof(T)}; line += 64) {
      cpu::prefetch_far(reinterpret_cast<const char*>(next + j) + line);
    }
    const cpu::PairOf<T> pair = cpu::load2_unordered(x + j);
    const Vec low = term_of(pair.low), high = term_of(pair.high);
    sums[0] += low;
    sums[1] += high;
    cpu::store(buffer + j, low);
    cpu::store(buffer + j + kStep, high);
    if (before.output != nullptr) write_pair<T, kStream>(before, j);
  }
  if (before.output != nullptr) write_rest(before, j, columns);
  for (; j < columns; j += kStep) {
    const cpu::SomeLanes rest{static_cast<int>(columns - j < kStep ? columns - j : kStep)};
    const Vec term = cpu::keep(term_of(cpu::load(x + j, rest)), rest, 0.0f);
    sums[0] += term;
    cpu::store(buffer + j, term, rest);
  }
  return cpu::horizontal_sum(sums[0] + sums[1]);
}

// Neither mask nor log: the rows of a block one after the other, two of them at a time.
template <class T, bool kStream>
void plain_rows(const ForwardRows& block) {
  const float scale = block.scale;
  Waiting<T> waiting;
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* x = static_cast<const T*>(block.x) + i * block.x_stride_elements;
    const T* next = i + 1 < block.rows ? x + block.x_stride_elements : x;
    float* buffer = block.buffer + i % 2 * block.buffer_stride;
    const float center = center_of(largest_score(x, block.visible, scale));
    const float sum = exponentials<T, kStream>(x, next, block.visible, scale, center, buffer, waiting);
    // An infinite factor makes NaN of a row of -inf alone, as torch has it.
    const float factor = sum == 0 && block.empty_is_zero ? 0.0f : 1.0f / sum;
    waiting = {static_cast<T*>(block.output) + i * block.columns, buffer, factor};
  }
  if (waiting.output != nullptr) write_whole<T, kStream>(waiting, block.visible);
}

// With log and no mask: twice over the row as it lies in the nearest cache. The buffer has the scores afterwards, by
// slot.
template <class T>
KP_PRIMITIVE Totals reduce_row(const T* x, const T* next, const ForwardRows& block) {
  // Copies, since a store into the buffer might change the block for all that the compiler knows.
  const float scale = block.scale;
  float* const buffer = block.buffer;
  Vec sums[2] = {};
  const float most = largest_score(x, block.visible, scale), center = center_of(most);
  cpu::for_slots<T>(x, block.visible, [&](Vec value, int64_t slot, int chain, auto lanes) {
    cpu::prefetch_far(next + slot);
    const Vec score = cpu::keep(value * scale, lanes, kMinusInfinity);
    sums[chain] += cpu::exp_fast(score - center);
    cpu::store(buffer + slot, score, lanes);
  });
  return {most, cpu::horizontal_sum(sums[0] + sums[1])};
}

template <class Lanes>
KP_PRIMITIVE cpu::VecU load_bytes(const uint8_t* from, Lanes lanes) {
  if constexpr (__is_same(Lanes, cpu::AllLanes)) {
    return cpu::widen_bits(cpu::load_storage<cpu::VecU8>(from));
  } else {
    return cpu::widen_bits(cpu::load_storage_partial<cpu::VecU8, 1>(from, lanes.count));
  }
}

// With a mask: its scores into the buffer, in the order of the columns. Returns the largest.
template <class T>
KP_PRIMITIVE float store_scores(const T* x, const void* mask, const ForwardRows& block) {
  Vec largest = cpu::broadcast(kMinusInfinity);
  cpu::for_columns<T>(block.visible, [&](int64_t j, auto lanes) {
    Vec score = cpu::load(x + j, lanes) * block.scale;
    if (block.mask_kind == MaskKind::kBool) {
      const cpu::VecU kept = load_bytes(static_cast<const uint8_t*>(mask) + j, lanes);
      score = cpu::select(kept != 0u, score, cpu::broadcast(kMinusInfinity));
    } else if (block.mask_kind == MaskKind::kSameType) {
      score += cpu::load(static_cast<const T*>(mask) + j, lanes);
    } else {
      score += cpu::load(static_cast<const float*>(mask) + j, lanes);
    }
    cpu::store(block.buffer + j, score, lanes);
    largest = cpu::max(cpu::keep(score, lanes, kMinusInfinity), largest);
  });
  return cpu::horizontal_max(largest);
}

float sum_buffer(float* buffer, int64_t columns, float center, bool log) {
  Vec sums[2] = {};
  cpu::for_slots<float>(buffer, columns, [&](Vec score, int64_t slot, int chain, auto lanes) {
    const Vec term = cpu::exp_fast(cpu::keep(score, lanes, kMinusInfinity) - center);
    sums[chain] += term;
    if (!log) cpu::store(buffer + slot, term, lanes);
  });
  return cpu::horizontal_sum(sums[0] + sums[1]);
}

// From the buffer: exponentials * factor, or scores - center - log(sum), both as (value - start) * factor - shift.
template <class T, bool kStream>
KP_PRIMITIVE void write_row(const ForwardRows& block, Totals totals, T* output) {
  const bool is_empty = totals.sum == 0 && block.empty_is_zero;
  // Without scores to remove, -inf alone must end as NaN: the logarithm of its sum is -inf, its inverse infinite.
  const float start = block.log ? center_of(totals.largest) : 0.0f;
  const float shift = !block.log || is_empty ? 0.0f : __builtin_logf(totals.sum);
  const float factor = block.log ? 1.0f : is_empty ? 0.0f : 1.0f / totals.sum;
  const float* const buffer = block.buffer;
  const auto value_at = [=](int64_t slot, auto lanes) {
    return (cpu::load(buffer + slot, lanes) - start) * factor - shift;
  };
  if (block.mask_kind == MaskKind::kNone) {
    cpu::write_slots<T, kStream>(output, block.visible, value_at);
  } else {
    cpu::write_columns<T, kStream>(output, block.visible, value_at);
  }
}

template <class T>
KP_PRIMITIVE void fill_removed(const ForwardRows& block, T* output) {
  const Vec removed = cpu::broadcast(block.log ? kMinusInfinity : 0.0f);
  cpu::for_columns<T>(block.columns - block.visible,
                      [&](int64_t j, auto lanes) { cpu::store(output + block.visible + j, removed, lanes); });
}

template <class T>
void forward(const ForwardRows& block) {
  const bool is_plain = block.mask_kind == MaskKind::kNone && !block.log;
  if (is_plain) block.stream_stores ? plain_rows<T, true>(block) : plain_rows<T, false>(block);
  const int64_t mask_bytes = block.mask_kind == MaskKind::kBool    ? 1
                             : block.mask_kind == MaskKind::kFloat ? int64_t{sizeof(float)}
                                                                   : int64_t{sizeof(T)};
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* x = static_cast<const T*>(block.x) + i * block.x_stride_elements;
    T* output = static_cast<T*>(block.output) + i * block.columns;
    fill_removed(block, output);
    if (is_plain) continue;
    Totals totals;
    if (block.mask_kind == MaskKind::kNone) {
      totals = reduce_row(x, i + 1 < block.rows ? x + block.x_stride_elements : x, block);
    } else {
      const void* mask = static_cast<const char*>(block.mask) + i * block.mask_stride_elements * mask_bytes;
      totals.largest = store_scores(x, mask, block);
      totals.sum = sum_buffer(block.buffer, block.visible, center_of(totals.largest), block.log);
    }
    if (block.stream_stores) {
      write_row<T, true>(block, totals, output);
    } else {
      write_row<T, false>(block, totals, output);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

// A row of the backward, and the distance to the next one's.
template <class T>
struct BackwardRow {
  const T* gradient;
  const T* output;
  int64_t to_next_gradient, to_next_output;
};

// Two rows read side by side, pair by pair: value_of(g, y). The next ones are asked for meanwhile: the first pass,
// which only reads, would wait for them, and this one leaves memory's reads idle.
template <class T, bool kStream, class Value>
KP_PRIMITIVE void write_values(T* to, int64_t columns, const BackwardRow<T>& row, Value value_of) {
  constexpr int kStep = cpu::kLanesOf<T>;
  const T *const gradient = row.gradient, *const output = row.output;
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    for (int64_t line = 0; line < int64_t{2 * kStep * sizeof(T)}; line += 64) {
      cpu::prefetch_far(reinterpret_cast<const char*>(gradient + j + row.to_next_gradient) + line);
      cpu::prefetch_far(reinterpret_cast<const char*>(output + j + row.to_next_output) + line);
    }
    const cpu::PairOf<T> g = cpu::load2_unordered(gradient + j), y = cpu::load2_unordered(output + j);
    const cpu::PairOf<T> pair{value_of(g.low, y.low), value_of(g.high, y.high)};
    if constexpr (kStream) {
      cpu::stream2_unordered(to + j, pair);
    } else {
      cpu::store2_unordered(to + j, pair);
    }
  }
  for (; j < columns; j += kStep) {
    const cpu::SomeLanes rest{static_cast<int>(columns - j < kStep ? columns - j : kStep)};
    cpu::store(to + j, value_of(cpu::load(gradient + j, rest), cpu::load(output + j, rest)), rest);
  }
}

template <class T>
KP_PRIMITIVE float sum_piece(const T* gradient, const T* output, int64_t columns, bool log) {
  constexpr int kStep = cpu::kLanesOf<T>;
  Vec sums[4] = {};
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    const cpu::PairOf<T> g = cpu::load2_unordered(gradient + j), y = cpu::load2_unordered(output + j);
    sums[0] += g.low * y.low;
    sums[1] += g.high * y.high;
    sums[2] += g.low;
    sums[3] += g.high;
  }
  for (; j < columns; j += kStep) {  // zeros past the end
    const cpu::SomeLanes rest{static_cast<int>(columns - j < kStep ? columns - j : kStep)};
    const Vec g = cpu::load(gradient + j, rest);
    sums[0] += g * cpu::load(output + j, rest);
    sums[2] += g;
  }
  return log ? cpu::horizontal_sum(sums[2] + sums[3]) : cpu::horizontal_sum(sums[0] + sums[1]);
}

// In pieces: with four or eight lanes one running sum of a wide row would lose more than the op's tolerance.
template <class T>
KP_PRIMITIVE float sum_row(const T* gradient, const T* output, int64_t columns, bool log) {
  constexpr int64_t kPiece = 4096;
  double total = 0;
  for (int64_t j = 0; j < columns; j += kPiece) {
    total += sum_piece(gradient + j, output + j, columns - j < kPiece ? columns - j : kPiece, log);
  }
  return static_cast<float>(total);
}

template <class T, bool kStream>
KP_PRIMITIVE void backward_row(const BackwardRows& block, const BackwardRow<T>& row, T* grad_input) {
  const float scaled_sum = sum_row(row.gradient, row.output, block.columns, block.log) * block.scale;
  if (block.log) {
    const float removed = block.masked ? kMinusInfinity : __builtin_nanf("");  // nothing equals NaN
    write_values<T, kStream>(grad_input, block.columns, row, [&](Vec g, Vec y) {
      const Vec value = g * block.scale - cpu::exp_fast(y) * scaled_sum;
      return cpu::select(y == removed, Vec{}, value);
    });
  } else {
    write_values<T, kStream>(grad_input, block.columns, row,
                             [&](Vec g, Vec y) { return y * (g * block.scale - scaled_sum); });
  }
}

template <class T>
void backward(const BackwardRows& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const bool is_last = i + 1 == block.rows;
    const BackwardRow<T> row{static_cast<const T*>(block.grad_output) + i * block.grad_output_stride_elements,
                             static_cast<const T*>(block.output) + i * block.output_stride_elements,
                             is_last ? 0 : block.grad_output_stride_elements,
                             is_last ? 0 : block.output_stride_elements};
    T* grad_input = static_cast<T*>(block.grad_input) + i * block.columns;
    if (block.stream_stores) {
      backward_row<T, true>(block, row, grad_input);
    } else {
      backward_row<T, false>(block, row, grad_input);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {
    {forward<float>, backward<float>}, {forward<BFloat16>, backward<BFloat16>}, {forward<Float16>, backward<Float16>}};

}  // namespace kernel_pytorch::softmax::KP_ISA_NAMESPACE
