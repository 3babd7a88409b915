// What the direct loops do not take: dropout of a function, biases of another type than the rows', and sums over rows.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cpu/spans_isa.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {
namespace {

template <class T>
KP_PRIMITIVE void write_pair(T* to, cpu::PairOf<T> pair, bool stream) {
  if (stream) {
    cpu::stream2(to, pair);
  } else {
    cpu::store2(to, pair);
  }
}

// body(j, lanes, out) fills out with the results for the lanes from column j on; kOutputs arrays are written.
template <int kOutputs>
struct Results {
  Vec values[kOutputs];
};
template <class T, int kOutputs, class Body>
KP_PRIMITIVE void write_span(T* const (&to)[kOutputs], int64_t count, bool stream, Body body) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= count; j += 2 * kLanes) {
    const Results<kOutputs> low = body(j, AllLanes()), high = body(j + kLanes, AllLanes());
    for (int i = 0; i < kOutputs; ++i) write_pair<T>(to[i] + j, {low.values[i], high.values[i]}, stream);
  }
  for (; j < count; j += kLanes) {
    const SomeLanes rest{static_cast<int>(count - j < kLanes ? count - j : kLanes)};
    const Results<kOutputs> last = body(j, rest);
    for (int i = 0; i < kOutputs; ++i) cpu::store(to[i] + j, last.values[i], rest);
  }
}

// Spans of floats in the nearest cache, in three steps: the functions are built once and
// not for every type and option.
struct Span {
  alignas(64) float gradients[kSpan];
  alignas(64) float values[kSpan];  // first the functions' arguments
  alignas(64) float derivatives[kSpan];
};

// Lanes past the end hold arbitrary values; their results are not read.
template <Kind kKind, int kBits>
void apply_as(Span& span, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    cpu::store(span.values + j, function<kKind, kBits>(cpu::load(span.values + j)));
  }
}

// A gate's gradient needs the functions' values too.
template <Kind kKind, bool kGated>
void differentiate_as(Span& span, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const Values at = differentiate<kKind, kFloatBits>(cpu::load(span.values + j));
    if constexpr (kGated) cpu::store(span.values + j, at.value);
    cpu::store(span.derivatives + j, at.derivative);
  }
}

using SpanStep = void (*)(Span&, int64_t);
template <bool kGated>
constexpr SpanStep kDifferentiate[kKindCount] = {
    differentiate_as<Kind::kGelu, kGated>,        differentiate_as<Kind::kGeluTanh, kGated>,
    differentiate_as<Kind::kSilu, kGated>,        differentiate_as<Kind::kRelu, kGated>,
    differentiate_as<Kind::kReluSquared, kGated>, differentiate_as<Kind::kSigmoid, kGated>,
    differentiate_as<Kind::kTanh, kGated>,        differentiate_as<Kind::kIdentity, kGated>};

// Memory works ahead while the lanes compute: what the last step of a span needs is asked for in the first, what the
// first step of the next span needs in the last.
template <class T>
KP_PRIMITIVE const T* next_span(const RowsOf& rows, const SpanPlace& place, int64_t columns) {
  return place.column + kSpan < columns ? row_of<T>(rows, place.row) + place.column + kSpan
                                        : row_of<T>(rows, place.row + 1);
}

template <class T>
KP_PRIMITIVE void read_span(const BackwardRows& block, const SpanPlace& place, SpanBits& bits, Span& span) {
  const T* grad_output = row_of<T>(block.grad_output, place.row) + place.column;
  const T* gate = row_of<T>(block.gate, place.row) + place.column;
  const T* up = block.up.data == nullptr ? gate : row_of<T>(block.up, place.row) + place.column;
  const bool drops = block.dropout.threshold != 0;
  if (drops) {
    draw(bits, block.dropout, block.dropout.first_element + place.row * block.columns + place.column, place.count);
  }
  cpu::for_columns<T>(place.count, [&](int64_t j, auto lanes) {
    cpu::prefetch_far(up + j);
    const Vec gradient = cpu::load(grad_output + j, lanes);
    cpu::store(span.gradients + j, drops ? drop(gradient, bits, block.dropout, j) : gradient);
    cpu::store(span.values + j, biased(gate, block.gate_bias, block.bias_is_float, j, place.column, lanes));
  });
}

template <class Lanes>
KP_PRIMITIVE void add_to(float* partial, Vec value, int64_t j, Lanes lanes) {
  if (partial != nullptr) cpu::store(partial + j, cpu::load(partial + j, lanes) + value, lanes);
}

template <class T, bool kGated>
KP_PRIMITIVE void write_gradients(const BackwardRows& block, const SpanPlace& place, const Span& span) {
  const T* up = kGated ? row_of<T>(block.up, place.row) + place.column : nullptr;
  T* outputs[1 + kGated] = {row_of<T>(block.grad_gate, place.row) + place.column};
  if constexpr (kGated) outputs[1] = row_of<T>(block.grad_up, place.row) + place.column;
  const T* next_gate = next_span<T>(block.gate, place, block.columns);
  const T* next_gradient = next_span<T>(block.grad_output, place, block.columns);
  write_span<T>(outputs, place.count, block.stream_stores, [&](int64_t j, auto lanes) {
    cpu::prefetch_far(next_gate + j);
    cpu::prefetch_far(next_gradient + j);
    const Vec gradient = cpu::load(span.gradients + j);
    Results<1 + kGated> results;
    results.values[0] = gradient * cpu::load(span.derivatives + j);
    if constexpr (kGated) {
      results.values[0] *= biased(up, block.up_bias, block.bias_is_float, j, place.column, lanes);
      results.values[1] = gradient * cpu::load(span.values + j);
      add_to(block.up_partial, results.values[1], place.column + j, lanes);
    }
    add_to(block.gate_partial, results.values[0], place.column + j, lanes);
    return results;
  });
}

template <class T>
void backward_in_steps(const BackwardRows& block) {
  SpanBits bits;
  Span span;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += kSpan) {
      const SpanPlace place{row, column, block.columns - column < kSpan ? block.columns - column : kSpan};
      read_span<T>(block, place, bits, span);
      if (block.up.data != nullptr) {
        kDifferentiate<true>[static_cast<int>(block.kind)](span, place.count);
        write_gradients<T, true>(block, place, span);
      } else {
        kDifferentiate<false>[static_cast<int>(block.kind)](span, place.count);
        write_gradients<T, false>(block, place, span);
      }
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class T>
KP_PRIMITIVE void write_values(const ForwardRows& block, const SpanPlace& place, const Span& span, SpanBits& bits) {
  const auto at = [&](const RowsOf& rows) {
    return rows.data == nullptr ? nullptr : row_of<T>(rows, place.row) + place.column;
  };
  const T *up = at(block.up), *residual = at(block.residual);
  const bool drops = block.dropout.threshold != 0;
  if (drops) {
    draw(bits, block.dropout, block.dropout.first_element + place.row * block.columns + place.column, place.count);
  }
  const T* next_gate = next_span<T>(block.gate, place, block.columns);
  T* const output[1] = {at(block.output)};
  write_span<T>(output, place.count, block.stream_stores, [&](int64_t j, auto lanes) -> Results<1> {
    cpu::prefetch_far(next_gate + j);
    Vec value = cpu::load(span.values + j);
    if (up != nullptr) value *= biased(up, block.up_bias, block.bias_is_float, j, place.column, lanes);
    if (drops) value = drop(value, bits, block.dropout, j);
    if (residual != nullptr) value += cpu::load(residual + j, lanes);
    return {{value}};
  });
}

template <class T>
void forward_in_steps(const ForwardRows& block, SpanStep apply) {
  SpanBits bits;
  Span span;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += kSpan) {
      const SpanPlace place{row, column, block.columns - column < kSpan ? block.columns - column : kSpan};
      const T* gate = row_of<T>(block.gate, row) + column;
      const T* factors = block.up.data == nullptr ? gate : row_of<T>(block.up, row) + column;
      const T* added = block.residual.data == nullptr ? gate : row_of<T>(block.residual, row) + column;
      cpu::for_columns<T>(place.count, [&](int64_t j, auto lanes) {
        cpu::prefetch_far(factors + j);
        cpu::prefetch_far(added + j);
        cpu::store(span.values + j, biased(gate, block.gate_bias, block.bias_is_float, j, column, lanes));
      });
      apply(span, place.count);
      write_values<T>(block, place, span, bits);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

}  // namespace
}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
