// The pointwise ops on the lanes of the CPU, built once per instruction level: each element is read once, and leaves by
// stores that bypass the caches where the output is large. fp32, bf16 and fp16; the reference takes fp64.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/ops/pointwise/pointwise_dropout_cpu.h"
#include "kernel_pytorch/ops/pointwise/pointwise_math_cpu.h"
#include "kernel_pytorch/ops/pointwise/pointwise_rows.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {
namespace {

using cpu::AllLanes;
using cpu::kLanes;
using cpu::SomeLanes;

constexpr int64_t kSpan = 2048;  // columns whose dropout bits are drawn at once: 4 KB, well within the nearest cache

// The bits of one span of a row.
struct SpanBits {
  alignas(64) uint16_t storage[kSpan + (cpu::kDoubleLanes + 1) * kPhiloxElements];
  const uint16_t* first;
};

KP_WORD void draw(SpanBits& bits, const DropoutRows& dropout, int64_t element, int64_t count) {
  const auto first = static_cast<uint64_t>(element), skipped = first % kPhiloxElements;
  const auto blocks =
      static_cast<int64_t>(skipped + static_cast<uint64_t>(count) + kPhiloxElements - 1) / kPhiloxElements;
  fill_bits(dropout.seed, dropout.offset, first / kPhiloxElements, blocks, bits.storage);
  bits.first = bits.storage + skipped;
}

// Reading past a span's end stays inside the storage.
KP_WORD Vec drop(Vec value, const SpanBits& bits, const DropoutRows& dropout, int64_t j) {
  const cpu::VecU drawn = cpu::widen_bits(cpu::load_storage<cpu::VecU16>(bits.first + j));
  return cpu::select(drawn < dropout.threshold, Vec{}, value * dropout.scale);
}

template <class T>
KP_WORD T* row_of(const RowsOf& rows, int64_t row) {
  return rows.data == nullptr ? nullptr : static_cast<T*>(rows.data) + row * rows.stride_elements;
}

template <class T, class Lanes>
KP_WORD Vec biased(const T* row, const void* bias, bool bias_is_float, int64_t j, int64_t column, Lanes lanes) {
  const Vec value = cpu::load(row + j, lanes);
  if (bias == nullptr) return value;
  return value + (bias_is_float ? cpu::load(static_cast<const float*>(bias) + column + j, lanes)
                                : cpu::load(static_cast<const T*>(bias) + column + j, lanes));
}

template <class T>
KP_WORD void write_pair(T* to, cpu::PairOf<T> pair, bool stream) {
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
KP_WORD void write_span(T* const (&to)[kOutputs], int64_t count, bool stream, Body body) {
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

template <class T, Kind kKind, bool kGated>
void forward_as(const ForwardRows& block) {
  SpanBits bits;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += kSpan) {
      const int64_t count = block.columns - column < kSpan ? block.columns - column : kSpan;
      const T* gate = row_of<T>(block.gate, row) + column;
      const T* up = kGated ? row_of<T>(block.up, row) + column : nullptr;
      const T* residual = row_of<T>(block.residual, row);
      const bool drops = block.dropout.threshold != 0;
      if (drops) draw(bits, block.dropout, block.dropout.first_element + row * block.columns + column, count);
      T* const output[1] = {row_of<T>(block.output, row) + column};
      write_span<T>(output, count, block.stream_stores, [&](int64_t j, auto lanes) -> Results<1> {
        Vec value = function<kKind, kBitsOf<T>>(biased(gate, block.gate_bias, block.bias_is_float, j, column, lanes));
        if constexpr (kGated) value *= biased(up, block.up_bias, block.bias_is_float, j, column, lanes);
        if (drops) value = drop(value, bits, block.dropout, j);
        if (residual != nullptr) value += cpu::load(residual + column + j, lanes);
        return {{value}};
      });
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class Lanes>
KP_WORD void add_to(float* partial, Vec value, int64_t j, Lanes lanes) {
  if (partial != nullptr) cpu::store(partial + j, cpu::load(partial + j, lanes) + value, lanes);
}

template <class T, Kind kKind, bool kGated>
void backward_as(const BackwardRows& block) {
  SpanBits bits;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += kSpan) {
      const int64_t count = block.columns - column < kSpan ? block.columns - column : kSpan;
      const T* grad_output = row_of<T>(block.grad_output, row) + column;
      const T* gate = row_of<T>(block.gate, row) + column;
      const T* up = kGated ? row_of<T>(block.up, row) + column : nullptr;
      const bool drops = block.dropout.threshold != 0;
      if (drops) draw(bits, block.dropout, block.dropout.first_element + row * block.columns + column, count);
      const auto gradients = [&](int64_t j, auto lanes) -> Results<1 + kGated> {
        Vec gradient = cpu::load(grad_output + j, lanes);
        if (drops) gradient = drop(gradient, bits, block.dropout, j);
        const Values at =
            differentiate<kKind, kFloatBits>(biased(gate, block.gate_bias, block.bias_is_float, j, column, lanes));
        Results<1 + kGated> results;
        results.values[0] = gradient * at.derivative;
        if constexpr (kGated) {
          results.values[0] *= biased(up, block.up_bias, block.bias_is_float, j, column, lanes);
          results.values[1] = gradient * at.value;
          add_to(block.up_partial, results.values[1], column + j, lanes);
        }
        add_to(block.gate_partial, results.values[0], column + j, lanes);
        return results;
      };
      T* const grad_gate = row_of<T>(block.grad_gate, row) + column;
      if constexpr (kGated) {
        T* const outputs[2] = {grad_gate, row_of<T>(block.grad_up, row) + column};
        write_span<T>(outputs, count, block.stream_stores, gradients);
      } else {
        T* const outputs[1] = {grad_gate};
        write_span<T>(outputs, count, block.stream_stores, gradients);
      }
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class T, Kind kKind>
void run(const ForwardRows& block) {
  if constexpr (is_gated_kind(kKind)) {
    if (block.up.data != nullptr) return forward_as<T, kKind, true>(block);
  }
  forward_as<T, kKind, false>(block);
}
template <class T, Kind kKind>
void run(const BackwardRows& block) {
  if constexpr (is_gated_kind(kKind)) {
    if (block.up.data != nullptr) return backward_as<T, kKind, true>(block);
  }
  backward_as<T, kKind, false>(block);
}

template <class T, class Block>
void run_kind(const Block& block) {
  switch (block.kind) {
    case Kind::kGelu:
      return run<T, Kind::kGelu>(block);
    case Kind::kGeluTanh:
      return run<T, Kind::kGeluTanh>(block);
    case Kind::kSilu:
      return run<T, Kind::kSilu>(block);
    case Kind::kRelu:
      return run<T, Kind::kRelu>(block);
    case Kind::kReluSquared:
      return run<T, Kind::kReluSquared>(block);
    case Kind::kSigmoid:
      return run<T, Kind::kSigmoid>(block);
    case Kind::kTanh:
      return run<T, Kind::kTanh>(block);
    case Kind::kIdentity:
      return run<T, Kind::kIdentity>(block);
  }
}

template <class T>
constexpr RowKernels kernels_for() {
  return {run_kind<T, ForwardRows>, run_kind<T, BackwardRows>};
}

}  // namespace

RowKernels row_kernels(int type) {
  constexpr RowKernels kKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(), kernels_for<Float16>()};
  return kKernels[type];
}

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
