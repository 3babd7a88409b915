// The norms of rows on the lanes of the CPU, built once per instruction level. A row is read from memory once, stays in
// the nearest cache for the second pass, and leaves by stores that bypass the caches where the output is large.
// Statistics take two passes over the cached row (mean, then squares around it), or one where 16 bits are all that is
// kept. Both sum differences from a pivot of the row: no cancellation, however large the mean, and no rounding at all
// where the row is constant, so that its output is 0 and not what rstd makes of a mean's last bit.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/engines/row_norm/cpu/rows.h"

namespace kernel_pytorch::row_norm::KP_ISA_NAMESPACE {
namespace {

using cpu::AllLanes;
using cpu::for_columns;
using cpu::keep;
using cpu::kLanesOf;
using cpu::load;
using cpu::ScalarOf;
using cpu::SomeLanes;
using cpu::store;
using cpu::Vec;
using cpu::VecOf;
using cpu::write_columns;

// Sum over the row of term(values). Four running sums hide the latency of the adds.
template <class T, class Term>
KP_PRIMITIVE ScalarOf<T> sum_row(const T* row, int64_t columns, Term term) {
  constexpr int kStep = kLanesOf<T>;
  VecOf<T> sum0{}, sum1{}, sum2{}, sum3{};
  int64_t j = 0;
  for (; j + 4 * kStep <= columns; j += 4 * kStep) {
    const cpu::PairOf<T> first = cpu::load2_unordered(row + j), second = cpu::load2_unordered(row + j + 2 * kStep);
    sum0 += term(first.low);
    sum1 += term(first.high);
    sum2 += term(second.low);
    sum3 += term(second.high);
  }
  for (; j + kStep <= columns; j += kStep) sum0 += term(cpu::load(row + j));
  if (j < columns) {
    const SomeLanes rest{static_cast<int>(columns - j)};
    sum1 += keep(term(load(row + j, rest)), rest);
  }
  return cpu::horizontal_sum((sum0 + sum1) + (sum2 + sum3));
}

template <class T>
const T* row_of(const void* first, int64_t row, int64_t stride_elements) {
  return first == nullptr ? nullptr : static_cast<const T*>(first) + row * stride_elements;
}
template <class T>
T* row_of(void* first, int64_t row, int64_t stride_elements) {
  return first == nullptr ? nullptr : static_cast<T*>(first) + row * stride_elements;
}

template <class Scalar>
struct Statistics {
  Scalar mean;
  Scalar rstd;
};

// The median of the first, middle and last value: seldom far from the mean, and a value of the row, so that differences
// from it have no more bits than the row's values and their sums round as rarely.
template <class T>
KP_PRIMITIVE ScalarOf<T> pivot_of(const T* value, int64_t columns) {
  if (columns == 0) return 0;
  const auto at = [value](int64_t j) {
    const SomeLanes one{1};
    return cpu::horizontal_sum(keep(load(value + j, one), one));
  };
  const ScalarOf<T> first = at(0), middle = at(columns / 2), last = at(columns - 1);
  const ScalarOf<T> lower = first < middle ? first : middle, upper = first < middle ? middle : first;
  return last < lower ? lower : upper < last ? upper : last;
}

// Sums over the row of differences from a centre, and of their squares.
template <class Scalar>
struct Sums {
  Scalar differences;
  Scalar squares;
};
template <class T>
KP_PRIMITIVE Sums<ScalarOf<T>> sums_around(const T* row, int64_t columns, ScalarOf<T> center) {
  constexpr int kStep = kLanesOf<T>;
  constexpr int64_t kBlock = 128 * kStep;  // columns summed by themselves: a long chain would round more often
  VecOf<T> sum{}, lost{}, squares{};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = columns - begin < kBlock ? columns : begin + kBlock;
    VecOf<T> sums[4] = {}, parts[4] = {};  // that do not wait for each other
    const auto add = [&](int chain, VecOf<T> difference) {
      sums[chain] += difference;
      parts[chain] += difference * difference;
    };
    int64_t j = begin;
    for (; j + 4 * kStep <= end; j += 4 * kStep) {
      const cpu::PairOf<T> first = cpu::load2_unordered(row + j), second = cpu::load2_unordered(row + j + 2 * kStep);
      add(0, first.low - center);
      add(1, first.high - center);
      add(2, second.low - center);
      add(3, second.high - center);
    }
    for (; j < end; j += kStep) {
      const SomeLanes rest{static_cast<int>(end - j < kStep ? end - j : kStep)};
      add(0, keep(load(row + j, rest) - center, rest));
    }
    // Compensated: the sum of a long row is large where the centre is not its mean.
    const VecOf<T> part = (sums[0] + sums[1]) + (sums[2] + sums[3]), total = sum + part, added = total - sum;
    lost += (sum - (total - added)) + (part - added);
    sum = total;
    squares += (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  return {cpu::horizontal_sum(sum) + cpu::horizontal_sum(lost), cpu::horizontal_sum(squares)};
}

// One pass where results have 16 bits: what the difference of squares loses stays below their rounding, unless two of
// the three values that the pivot is chosen of are far from all others. Otherwise a second pass around the mean, which
// also takes away what the sum around the pivot rounded.
template <class T>
KP_PRIMITIVE Statistics<ScalarOf<T>> centered_statistics_of(const T* value, const ForwardRows& block) {
  using Scalar = ScalarOf<T>;
  const Scalar count = static_cast<Scalar>(block.columns);
  Scalar center = pivot_of(value, block.columns);
  Sums<Scalar> sums = sums_around(value, block.columns, center);
  if constexpr (sizeof(T) > 2) {
    center += sums.differences / count;
    sums = sums_around(value, block.columns, center);
  }
  const Scalar distance = sums.differences / count;
  const Scalar variance = sums.squares / count - distance * distance;
  // Not std::max: a NaN must stay one.
  const Scalar least = variance < 0 ? Scalar(0) : variance;
  return {center + distance,
          static_cast<Scalar>(1) / static_cast<Scalar>(__builtin_sqrt(least + static_cast<Scalar>(block.eps)))};
}

template <class T>
KP_PRIMITIVE Statistics<ScalarOf<T>> statistics_of(const T* value, const ForwardRows& block) {
  using Scalar = ScalarOf<T>;
  if (block.centered) return centered_statistics_of(value, block);
  const Scalar count = static_cast<Scalar>(block.columns);
  const Scalar squares = sum_row(value, block.columns, [](VecOf<T> values) { return values * values; });
  return {0, static_cast<Scalar>(1) /
                 static_cast<Scalar>(__builtin_sqrt(squares / count + static_cast<Scalar>(block.eps)))};
}

// weight + offset at column j, or ones.
template <class T, class W, class Lanes>
KP_PRIMITIVE VecOf<T> scale_at(const W* weight, ScalarOf<T> offset, int64_t j, Lanes lanes) {
  if (weight == nullptr) return cpu::broadcast(ScalarOf<T>(1));
  return load(weight + j, lanes) + offset;
}

// Exact to what the output's type O keeps.
template <class O>
KP_PRIMITIVE Vec activated(pointwise::Kind kind, Vec x) {
  namespace functions = pointwise::KP_ISA_NAMESPACE;
  using pointwise::Kind;
  constexpr int kBits = __is_same(O, BFloat16) ? 8 : __is_same(O, Float16) ? 11 : functions::kFloatBits;
  switch (kind) {
    case Kind::kGelu:
      return functions::function<Kind::kGelu, kBits>(x);
    case Kind::kGeluTanh:
      return functions::function<Kind::kGeluTanh, kBits>(x);
    case Kind::kSilu:
      return functions::function<Kind::kSilu, kBits>(x);
    case Kind::kRelu:
      return functions::function<Kind::kRelu, kBits>(x);
    case Kind::kReluSquared:
      return functions::function<Kind::kReluSquared, kBits>(x);
    case Kind::kSigmoid:
      return functions::function<Kind::kSigmoid, kBits>(x);
    case Kind::kTanh:
      return functions::function<Kind::kTanh, kBits>(x);
    case Kind::kIdentity:
      return x;
  }
  return x;
}

// Columns of one type throughout may be taken in the order that costs least. O is the output's type.
template <class T, class W, class O, bool kStream, bool kActivated>
KP_PRIMITIVE void write_normalised(const T* value, const T* next_value, O* output, Statistics<ScalarOf<T>> statistics,
                                   const ForwardRows& block) {
  constexpr bool kUnordered = __is_same(T, W) && __is_same(T, O);
  const W* weight = static_cast<const W*>(block.weight);
  const W* bias = static_cast<const W*>(block.bias);
  const auto offset = static_cast<ScalarOf<T>>(block.weight_offset);
  const auto load_pair = [](const auto* from) {
    if constexpr (kUnordered) {
      return cpu::load2_unordered(from);
    } else {
      return cpu::load2(from);
    }
  };
  cpu::write_columns_in_pairs<O, kStream, kUnordered>(
      output, block.columns,
      [&](int64_t j) {
        cpu::prefetch_far(next_value + j);
        cpu::prefetch_far(next_value + j + kLanesOf<T>);
        cpu::PairOf<T> normal = load_pair(value + j);
        normal.low = (normal.low - statistics.mean) * statistics.rstd;
        normal.high = (normal.high - statistics.mean) * statistics.rstd;
        if (weight != nullptr) {
          const cpu::PairOf<T> scale = load_pair(weight + j);
          normal.low *= scale.low + offset;
          normal.high *= scale.high + offset;
        }
        if (bias != nullptr) {
          const cpu::PairOf<T> shift = load_pair(bias + j);
          normal.low += shift.low;
          normal.high += shift.high;
        }
        if constexpr (kActivated) {
          normal.low = activated<O>(block.activation, normal.low);
          normal.high = activated<O>(block.activation, normal.high);
        }
        return normal;
      },
      [&](int64_t j, auto lanes) {
        VecOf<T> normal = (load(value + j, lanes) - statistics.mean) * statistics.rstd;
        normal *= scale_at<T>(weight, offset, j, lanes);
        if (bias != nullptr) normal += load(bias + j, lanes);
        if constexpr (kActivated) normal = activated<O>(block.activation, normal);
        return normal;
      });
}

template <class T, class W, class O>
KP_PRIMITIVE void write_row(const T* value, const T* next_value, int64_t row, Statistics<ScalarOf<T>> statistics,
                            const ForwardRows& block) {
  O* output = row_of<O>(block.output, row, block.columns);
  if constexpr (!__is_same(T, double)) {
    const bool activates = block.activation != pointwise::Kind::kIdentity;
    if (activates && block.stream_stores) {
      return write_normalised<T, W, O, true, true>(value, next_value, output, statistics, block);
    }
    if (activates) return write_normalised<T, W, O, false, true>(value, next_value, output, statistics, block);
  }
  if (block.stream_stores) {
    write_normalised<T, W, O, true, false>(value, next_value, output, statistics, block);
  } else {
    write_normalised<T, W, O, false, false>(value, next_value, output, statistics, block);
  }
}

// R is the residual's type.
template <class T, class R>
KP_PRIMITIVE void write_sum(const T* x, T* sum, int64_t row, const ForwardRows& block) {
  const R* residual = row_of<R>(block.residual, row, block.residual_stride_elements);
  write_columns<T, false>(sum, block.columns,
                          [&](int64_t j, auto lanes) { return load(x + j, lanes) + load(residual + j, lanes); });
}

// N is the type that the residual and the output may have instead of T.
template <class T, class W, class N>
void forward(const ForwardRows& block) {
  using Scalar = ScalarOf<T>;
  for (int64_t row = 0; row < block.rows; ++row) {
    const T* value = row_of<T>(block.x, row, block.x_stride_elements);
    const T* next_value = row + 1 < block.rows ? value + block.x_stride_elements : value;
    if (block.residual != nullptr) {
      T* sum = row_of<T>(block.sum, row, block.columns);
      block.narrow_residual ? write_sum<T, N>(value, sum, row, block) : write_sum<T, T>(value, sum, row, block);
      value = sum;  // rounded, as whoever reads the sum output sees it
    }
    const Statistics<Scalar> statistics = statistics_of(value, block);
    if (block.narrow_output) {
      write_row<T, W, N>(value, next_value, row, statistics, block);
    } else {
      write_row<T, W, T>(value, next_value, row, statistics, block);
    }
    if (block.mean != nullptr) static_cast<Scalar*>(block.mean)[row] = statistics.mean;
    if (block.rstd != nullptr) static_cast<Scalar*>(block.rstd)[row] = statistics.rstd;
  }
  if (block.stream_stores) cpu::stream_fence();
}

// A row of the backward, its pointers resolved. G is the type of grad_output.
template <class T, class W, class G>
struct BackwardRow {
  const G* grad_output;
  const T* value;
  const T* grad_sum;
  const W* weight;
  ScalarOf<T> mean, rstd, offset;

  template <class Lanes>
  KP_PRIMITIVE VecOf<T> normal(const BackwardRow& row, int64_t j, Lanes lanes) {
    return (load(row.value + j, lanes) - row.mean) * row.rstd;
  }
  template <class Lanes>
  KP_PRIMITIVE VecOf<T> scaled(const BackwardRow& row, VecOf<T> gradient, int64_t j, Lanes lanes) {
    return gradient * scale_at<T>(row.weight, row.offset, j, lanes);
  }
};

// First pass: the sums over the row that the input's gradient needs, and this row's share of the columns' sums.
template <class T, class W, class G>
KP_PRIMITIVE Statistics<ScalarOf<T>> reduce_row(const BackwardRow<T, W, G>& row, const BackwardRows& block) {
  using Scalar = ScalarOf<T>;
  using Row = BackwardRow<T, W, G>;
  auto* weight_partial = static_cast<Scalar*>(block.weight_partial);
  auto* bias_partial = static_cast<Scalar*>(block.bias_partial);
  VecOf<T> sum_g{}, sum_g_normal{};
  for_columns<T>(block.columns, [&](int64_t j, auto lanes) {
    const auto gradient = load(row.grad_output + j, lanes);
    const auto normal = Row::normal(row, j, lanes);
    const auto g = Row::scaled(row, gradient, j, lanes);
    sum_g += keep(g, lanes);
    sum_g_normal += keep(g * normal, lanes);
    if (weight_partial != nullptr) {
      store(weight_partial + j, load(weight_partial + j, lanes) + gradient * normal, lanes);
    }
    if (bias_partial != nullptr) store(bias_partial + j, load(bias_partial + j, lanes) + gradient, lanes);
  });
  const Scalar count = static_cast<Scalar>(block.columns);
  return {block.centered ? cpu::horizontal_sum(sum_g) / count : Scalar(0), cpu::horizontal_sum(sum_g_normal) / count};
}

template <class T, class W, class G, bool kStream>
KP_PRIMITIVE void write_gradient(const BackwardRow<T, W, G>& row, T* grad_input, Statistics<ScalarOf<T>> means,
                                 const BackwardRows& block) {
  using Row = BackwardRow<T, W, G>;
  write_columns<T, kStream>(grad_input, block.columns, [&](int64_t j, auto lanes) {
    cpu::prefetch_far(row.grad_output + block.grad_output_stride_elements + j);
    cpu::prefetch_far(row.value + block.value_stride_elements + j);
    const auto g = Row::scaled(row, load(row.grad_output + j, lanes), j, lanes);
    const VecOf<T> gradient = (g - means.mean - Row::normal(row, j, lanes) * means.rstd) * row.rstd;
    return row.grad_sum == nullptr ? gradient : gradient + load(row.grad_sum + j, lanes);
  });
}

template <class T, class W, class G>
void backward(const BackwardRows& block) {
  using Scalar = ScalarOf<T>;
  for (int64_t i = 0; i < block.rows; ++i) {
    const BackwardRow<T, W, G> row{row_of<G>(block.grad_output, i, block.grad_output_stride_elements),
                                   row_of<T>(block.value, i, block.value_stride_elements),
                                   row_of<T>(block.grad_sum, i, block.grad_sum_stride_elements),
                                   static_cast<const W*>(block.weight),
                                   block.centered ? static_cast<const Scalar*>(block.mean)[i] : Scalar(0),
                                   static_cast<const Scalar*>(block.rstd)[i],
                                   static_cast<Scalar>(block.weight_offset)};
    const Statistics<Scalar> means = reduce_row(row, block);
    T* grad_input = row_of<T>(block.grad_input, i, block.columns);
    if (grad_input == nullptr) continue;
    if (block.stream_stores) {
      write_gradient<T, W, G, true>(row, grad_input, means, block);
    } else {
      write_gradient<T, W, G, false>(row, grad_input, means, block);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class T, class W>
void add_partials(const PartialSums& sums) {
  using Scalar = ScalarOf<T>;
  const auto* partials = static_cast<const Scalar*>(sums.partials);
  auto* total = static_cast<W*>(sums.total);
  for_columns<T>(sums.columns, [&](int64_t j, auto lanes) {
    VecOf<T> sum{};
    for (int64_t i = 0; i < sums.blocks; ++i) sum += load(partials + i * sums.block_stride_elements + j, lanes);
    store(total + j, sum, lanes);
  });
}

template <class T, class W, class N = T>
constexpr RowKernels kernels_for() {
  return {forward<T, W, N>, backward<T, W, N>, add_partials<T, W>};
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {
    kernels_for<float, float>(),           kernels_for<double, double>(),        kernels_for<BFloat16, BFloat16>(),
    kernels_for<BFloat16, float>(),        kernels_for<Float16, Float16>(),      kernels_for<Float16, float>(),
    kernels_for<float, float, BFloat16>(), kernels_for<float, float, Float16>(),
};

}  // namespace kernel_pytorch::row_norm::KP_ISA_NAMESPACE
