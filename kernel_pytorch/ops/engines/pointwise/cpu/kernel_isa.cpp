// The pointwise ops on the lanes of the CPU, built once per instruction level: each element is read once, and leaves by
// stores that bypass the caches where the output is large. fp32, bf16 and fp16; the reference takes fp64.
#include "kernel_pytorch/ops/engines/pointwise/cpu/steps_isa.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {
namespace {

// So far ahead that the machine's own prefetching, which stops at every page, is bridged.
template <class T>
KP_PRIMITIVE void prefetch_pair(const T* from) {
  constexpr int64_t kAheadBytes = 4096;
  for (int64_t line = 0; line < int64_t{2 * kLanes * sizeof(T)}; line += 64) {
    cpu::prefetch_near(reinterpret_cast<const char*>(from) + kAheadBytes + line);
  }
}

template <class T>
KP_PRIMITIVE void add2(cpu::PairOf<T>& pair, const T* from) {
  const cpu::PairOf<T> added = cpu::load2_unordered(from);
  pair = {pair.low + added.low, pair.high + added.high};
}
template <class T, class Lanes>
KP_PRIMITIVE Vec sum_of(Vec value, const T* from, int64_t j, Lanes lanes) {
  return from == nullptr ? value : value + cpu::load(from + j, lanes);
}

// Of the elements that load2_unordered<T> takes.
template <class T>
KP_PRIMITIVE cpu::PairOf<T> drop2(cpu::PairOf<T> pair, const SpanBits& bits, const DropoutRows& dropout, int64_t j) {
  if constexpr (!__is_same(T, BFloat16)) {
    return {drop(pair.low, bits, dropout, j), drop(pair.high, bits, dropout, j + kLanes)};
  } else {
    const cpu::VecU drawn = cpu::load_storage<cpu::VecU>(bits.first + j);
    return {drop_below(drawn & 0xffffu, dropout, pair.low), drop_below(drawn >> 16, dropout, pair.high)};
  }
}

// Rows of a block in spans as long as a dropout's bits reach, or whole: use(place, bits).
template <bool kDrops>
KP_PRIMITIVE void for_spans(const auto& block, const auto& use) {
  const int64_t length = kDrops ? kSpan : block.columns;
  SpanBits bits;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += length) {
      const SpanPlace place{row, column, block.columns - column < length ? block.columns - column : length};
      if constexpr (kDrops) {
        draw(bits, block.dropout, block.dropout.first_element + row * block.columns + column, place.count);
      }
      use(place, bits);
    }
  }
}

template <class T>
KP_PRIMITIVE T* at_span(const RowsOf& rows, const SpanPlace& place) {
  return rows.data == nullptr ? nullptr : row_of<T>(rows, place.row) + place.column;
}
template <class T>
KP_PRIMITIVE const T* at_span(const void* bias, const SpanPlace& place) {
  return bias == nullptr ? nullptr : static_cast<const T*>(bias) + place.column;
}

template <class T>
KP_PRIMITIVE void write_unordered(T* to, cpu::PairOf<T> pair, bool stream) {
  if (stream) {
    cpu::stream2_unordered<T, true>(to, pair);
  } else {
    cpu::store2_unordered<T, true>(to, pair);
  }
}

// Straight from memory to memory, pairs of vectors in whatever order is cheapest: biases of the rows' type, and dropout
// for the identity alone. Its test in other functions' loops would take registers that gelu's tables need.
template <class T, Kind kKind, bool kGated, bool kDrops>
void forward_as(const ForwardRows& block) {
  constexpr int kBits = kBitsOf<T>;
  for_spans<kDrops>(block, [&](const SpanPlace& place, [[maybe_unused]] const SpanBits& bits) {
    const auto* const gate_bias = at_span<T>(block.gate_bias, place);
    const auto* const up_bias = at_span<T>(block.up_bias, place);
    const T *gate = at_span<T>(block.gate, place), *up = at_span<T>(block.up, place);
    const T* residual = at_span<T>(block.residual, place);
    T* const output = at_span<T>(block.output, place);
    int64_t j = 0;
    for (; j + 2 * kLanes <= place.count; j += 2 * kLanes) {
      prefetch_pair(gate + j);
      cpu::PairOf<T> pair = cpu::load2_unordered(gate + j);
      if (gate_bias != nullptr) add2(pair, gate_bias + j);
      pair = {function<kKind, kBits>(pair.low), function<kKind, kBits>(pair.high)};
      if constexpr (kGated) {
        prefetch_pair(up + j);
        cpu::PairOf<T> factors = cpu::load2_unordered(up + j);
        if (up_bias != nullptr) add2(factors, up_bias + j);
        pair = {pair.low * factors.low, pair.high * factors.high};
      }
      if constexpr (kDrops) pair = drop2<T>(pair, bits, block.dropout, j);
      if (residual != nullptr) {
        prefetch_pair(residual + j);
        add2(pair, residual + j);
      }
      write_unordered<T>(output + j, pair, block.stream_stores);
    }
    for (; j < place.count; j += kLanes) {
      const SomeLanes rest{static_cast<int>(place.count - j < kLanes ? place.count - j : kLanes)};
      Vec value = function<kKind, kBits>(sum_of(cpu::load(gate + j, rest), gate_bias, j, rest));
      if constexpr (kGated) value *= sum_of(cpu::load(up + j, rest), up_bias, j, rest);
      if constexpr (kDrops) value = drop(value, bits, block.dropout, j);
      cpu::store(output + j, sum_of(value, residual, j, rest), rest);
    }
  });
  if (block.stream_stores) cpu::stream_fence();
}

// Results of eleven bits where bf16 needs eight: what a derivative subtracts may enlarge an error twenty times.
template <class T>
inline constexpr int kDerivativeBits = __is_same(T, BFloat16) ? 11 : kFloatBits;

// The same of a backward, without dropout and without sums over rows, which need their columns in order and fp32.
template <class T, Kind kKind, bool kGated>
void backward_as(const BackwardRows& block) {
  constexpr int kBits = kDerivativeBits<T>;
  for_spans<false>(block, [&](const SpanPlace& place, const SpanBits&) {
    const auto* const gate_bias = at_span<T>(block.gate_bias, place);
    const auto* const up_bias = at_span<T>(block.up_bias, place);
    const T *grad_output = at_span<T>(block.grad_output, place), *gate = at_span<T>(block.gate, place);
    const T* up = at_span<T>(block.up, place);
    T *const grad_gate = at_span<T>(block.grad_gate, place), *const grad_up = at_span<T>(block.grad_up, place);
    int64_t j = 0;
    for (; j + 2 * kLanes <= place.count; j += 2 * kLanes) {
      prefetch_pair(grad_output + j);
      prefetch_pair(gate + j);
      cpu::PairOf<T> gradient = cpu::load2_unordered(grad_output + j), x = cpu::load2_unordered(gate + j);
      if (gate_bias != nullptr) add2(x, gate_bias + j);
      const Values low = differentiate<kKind, kBits>(x.low), high = differentiate<kKind, kBits>(x.high);
      if constexpr (kGated) {
        write_unordered<T>(grad_up + j, {gradient.low * low.value, gradient.high * high.value}, block.stream_stores);
        prefetch_pair(up + j);
        cpu::PairOf<T> factors = cpu::load2_unordered(up + j);
        if (up_bias != nullptr) add2(factors, up_bias + j);
        gradient = {gradient.low * factors.low, gradient.high * factors.high};
      }
      write_unordered<T>(grad_gate + j, {gradient.low * low.derivative, gradient.high * high.derivative},
                         block.stream_stores);
    }
    for (; j < place.count; j += kLanes) {
      const SomeLanes rest{static_cast<int>(place.count - j < kLanes ? place.count - j : kLanes)};
      Vec gradient = cpu::load(grad_output + j, rest);
      const Values values = differentiate<kKind, kBits>(sum_of(cpu::load(gate + j, rest), gate_bias, j, rest));
      if constexpr (kGated) {
        cpu::store(grad_up + j, gradient * values.value, rest);
        gradient *= sum_of(cpu::load(up + j, rest), up_bias, j, rest);
      }
      cpu::store(grad_gate + j, gradient * values.derivative, rest);
    }
  });
  if (block.stream_stores) cpu::stream_fence();
}

template <class T>
KP_PRIMITIVE bool biases_are_of(const auto& block) {
  const bool has_bias = block.gate_bias != nullptr || block.up_bias != nullptr;
  return !has_bias || block.bias_is_float == __is_same(T, float);
}

template <class T, Kind kKind>
void run_forward(const ForwardRows& block) {
  const bool drops = block.dropout.threshold != 0;
  if (biases_are_of<T>(block)) {
    if constexpr (is_gate(kKind)) {
      if (!drops && block.up.data != nullptr) return forward_as<T, kKind, true, false>(block);
    }
    if (!drops) return forward_as<T, kKind, false, false>(block);
    if constexpr (kKind == Kind::kIdentity) {
      if (block.up.data == nullptr) return forward_as<T, kKind, false, true>(block);
    }
  }
  // Where no word depends on the bits, one function serves all types.
  constexpr int kBits = kKind <= Kind::kSilu || kKind == Kind::kSigmoid ? kBitsOf<T> : kFloatBits;
  forward_in_steps<T>(block, apply_as<kKind, kBits>);
}

template <class T>
void forward(const ForwardRows& block) {
  constexpr void (*kRuns[kKindCount])(const ForwardRows&) = {
      run_forward<T, Kind::kGelu>, run_forward<T, Kind::kGeluTanh>,    run_forward<T, Kind::kSilu>,
      run_forward<T, Kind::kRelu>, run_forward<T, Kind::kReluSquared>, run_forward<T, Kind::kSigmoid>,
      run_forward<T, Kind::kTanh>, run_forward<T, Kind::kIdentity>};
  kRuns[static_cast<int>(block.kind)](block);
}

template <class T, Kind kKind>
void run_backward(const BackwardRows& block) {
  const bool has_sums = block.gate_partial != nullptr || block.up_partial != nullptr;
  if (has_sums || block.dropout.threshold != 0 || !biases_are_of<T>(block)) return backward_in_steps<T>(block);
  if constexpr (is_gate(kKind)) {
    if (block.up.data != nullptr) return backward_as<T, kKind, true>(block);
  }
  backward_as<T, kKind, false>(block);
}

template <class T>
void backward(const BackwardRows& block) {
  constexpr void (*kRuns[kKindCount])(const BackwardRows&) = {
      run_backward<T, Kind::kGelu>, run_backward<T, Kind::kGeluTanh>,    run_backward<T, Kind::kSilu>,
      run_backward<T, Kind::kRelu>, run_backward<T, Kind::kReluSquared>, run_backward<T, Kind::kSigmoid>,
      run_backward<T, Kind::kTanh>, run_backward<T, Kind::kIdentity>};
  kRuns[static_cast<int>(block.kind)](block);
}

}  // namespace

RowKernels row_kernels(int type) {
  constexpr RowKernels kKernels[kTypesCount] = {{forward<float>, backward<float>},
                                                {forward<BFloat16>, backward<BFloat16>},
                                                {forward<Float16>, backward<Float16>}};
  return kKernels[type];
}

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
