// The pointwise ops on the lanes of the CPU, built once per instruction level: each element is read once, and leaves by
// stores that bypass the caches where the output is large. fp32, bf16 and fp16; the reference takes fp64.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/rows.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {
namespace {

using cpu::AllLanes;
using cpu::kLanes;
using cpu::SomeLanes;

constexpr int64_t kSpan = 1024;  // columns that are worked on at once: their bits and floats fit the nearest cache

// The bits of one span of a row.
struct SpanBits {
  alignas(64) uint16_t storage[kSpan + (cpu::kLanes + 1) * kPhiloxElements];
  const uint16_t* first;
};

KP_PRIMITIVE void draw(SpanBits& bits, const DropoutRows& dropout, int64_t element, int64_t count) {
  const auto first = static_cast<uint64_t>(element), skipped = first % kPhiloxElements;
  const auto blocks =
      static_cast<int64_t>(skipped + static_cast<uint64_t>(count) + kPhiloxElements - 1) / kPhiloxElements;
  for (int64_t done = 0; done < blocks; done += kLanes) {
    cpu::philox_blocks(dropout.seed, dropout.offset, first / kPhiloxElements + static_cast<uint64_t>(done),
                       reinterpret_cast<uint32_t*>(bits.storage + done * kPhiloxElements));
  }
  bits.first = bits.storage + skipped;
}

// Reading past a span's end stays inside the storage.
KP_PRIMITIVE Vec drop(Vec value, const SpanBits& bits, const DropoutRows& dropout, int64_t j) {
  const cpu::VecU drawn = cpu::widen_bits(cpu::load_storage<cpu::VecU16>(bits.first + j));
  return cpu::select(drawn < dropout.threshold, Vec{}, value * dropout.scale);
}

template <class T>
KP_PRIMITIVE T* row_of(const RowsOf& rows, int64_t row) {
  return rows.data == nullptr ? nullptr : static_cast<T*>(rows.data) + row * rows.stride_elements;
}

template <class T, class Lanes>
KP_PRIMITIVE Vec biased(const T* row, const void* bias, bool bias_is_float, int64_t j, int64_t column, Lanes lanes) {
  const Vec value = cpu::load(row + j, lanes);
  if (bias == nullptr) return value;
  return value + (bias_is_float ? cpu::load(static_cast<const float*>(bias) + column + j, lanes)
                                : cpu::load(static_cast<const T*>(bias) + column + j, lanes));
}

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

// Significant bits of a result.
template <class T>
inline constexpr int kBitsOf = __is_same(T, BFloat16)  ? 8
                               : __is_same(T, Float16) ? 11
                                                       : kFloatBits;

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

// Without dropout, and biases of the rows' type: straight from memory to memory, pairs of vectors in whatever order is
// cheapest.
template <class T, Kind kKind, bool kGated>
void forward_as(const ForwardRows& block) {
  const T* const gate_bias = static_cast<const T*>(block.gate_bias);
  const T* const up_bias = static_cast<const T*>(block.up_bias);
  for (int64_t row = 0; row < block.rows; ++row) {
    const T* gate = row_of<T>(block.gate, row);
    const T* up = row_of<T>(block.up, row);
    const T* residual = row_of<T>(block.residual, row);
    T* const output = row_of<T>(block.output, row);
    int64_t j = 0;
    for (; j + 2 * kLanes <= block.columns; j += 2 * kLanes) {
      prefetch_pair(gate + j);
      cpu::PairOf<T> pair = cpu::load2_unordered(gate + j);
      if (gate_bias != nullptr) add2(pair, gate_bias + j);
      pair = {function<kKind, kBitsOf<T>>(pair.low), function<kKind, kBitsOf<T>>(pair.high)};
      if constexpr (kGated) {
        prefetch_pair(up + j);
        cpu::PairOf<T> factors = cpu::load2_unordered(up + j);
        if (up_bias != nullptr) add2(factors, up_bias + j);
        pair = {pair.low * factors.low, pair.high * factors.high};
      }
      if (residual != nullptr) {
        prefetch_pair(residual + j);
        add2(pair, residual + j);
      }
      if (block.stream_stores) {
        cpu::stream2_unordered<T, true>(output + j, pair);
      } else {
        cpu::store2_unordered<T, true>(output + j, pair);
      }
    }
    for (; j < block.columns; j += kLanes) {
      const SomeLanes rest{static_cast<int>(block.columns - j < kLanes ? block.columns - j : kLanes)};
      Vec value = function<kKind, kBitsOf<T>>(sum_of(cpu::load(gate + j, rest), gate_bias, j, rest));
      if constexpr (kGated) value *= sum_of(cpu::load(up + j, rest), up_bias, j, rest);
      cpu::store(output + j, sum_of(value, residual, j, rest), rest);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

// Everything else works on spans of floats in the nearest cache, in three steps: so the functions are built once and
// not for every type and option.
struct Span {
  alignas(64) float gradients[kSpan];
  alignas(64) float values[kSpan];  // first the functions' arguments
  alignas(64) float derivatives[kSpan];
};

// Where a span lies.
struct SpanPlace {
  int64_t row, column, count;
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
void backward(const BackwardRows& block) {
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

template <class T, Kind kKind>
void run(const ForwardRows& block) {
  const bool has_bias = block.gate_bias != nullptr || block.up_bias != nullptr;
  const bool is_direct = block.dropout.threshold == 0 && (!has_bias || block.bias_is_float == __is_same(T, float));
  if (!is_direct) {
    // Where no word depends on the bits, one function serves all types.
    constexpr int kBits = kKind <= Kind::kSilu || kKind == Kind::kSigmoid ? kBitsOf<T> : kFloatBits;
    return forward_in_steps<T>(block, apply_as<kKind, kBits>);
  }
  if constexpr (is_gate(kKind)) {
    if (block.up.data != nullptr) return forward_as<T, kKind, true>(block);
  }
  forward_as<T, kKind, false>(block);
}

template <class T>
void forward(const ForwardRows& block) {
  constexpr void (*kRuns[kKindCount])(const ForwardRows&) = {
      run<T, Kind::kGelu>,        run<T, Kind::kGeluTanh>, run<T, Kind::kSilu>, run<T, Kind::kRelu>,
      run<T, Kind::kReluSquared>, run<T, Kind::kSigmoid>,  run<T, Kind::kTanh>, run<T, Kind::kIdentity>};
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
