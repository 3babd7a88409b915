// Rows of the mixture on the lanes of the CPU, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/moe_mlp/cpu/rows.h"

namespace kernel_pytorch::moe_mlp::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using pointwise::Kind;

constexpr int64_t kColumns = 256;  // at a time, in buffers on the stack

KP_PRIMITIVE int64_t lanes_at(int64_t j, int64_t count) {
  return count - j < kLanes ? count - j : kLanes;
}
template <class T>
KP_PRIMITIVE Vec load_some(const T* from, int64_t lanes) {
  return lanes == kLanes ? cpu::load(from) : cpu::load_partial(from, lanes);
}
template <class T>
KP_PRIMITIVE void store_some(T* to, Vec value, int64_t lanes) {
  lanes == kLanes ? cpu::store(to, value) : cpu::store_partial(to, value, lanes);
}

template <class T>
void combine(const CombineTask& task) {
  for (int64_t j = 0; j < task.columns; j += kLanes) {
    const int64_t lanes = lanes_at(j, task.columns);
    Vec sum{};
    for (int64_t i = 0; i < task.count; ++i) {
      sum += load_some(static_cast<const T*>(task.rows[i]) + j, lanes) * task.factors[i];
    }
    store_some(static_cast<T*>(task.to) + j, sum, lanes);
  }
}

template <class T>
float scale(const ScaleTask& task) {
  Vec product{};
  for (int64_t j = 0; j < task.columns; j += kLanes) {
    const int64_t lanes = lanes_at(j, task.columns);
    const Vec value = load_some(static_cast<const T*>(task.from) + j, lanes);
    if (task.with != nullptr) product += value * load_some(static_cast<const T*>(task.with) + j, lanes);
    if (task.to != nullptr) store_some(static_cast<T*>(task.to) + j, value * task.factor, lanes);
  }
  return cpu::horizontal_sum(product);
}

template <class T>
float dot_floats(const void* row, const float* floats, int64_t columns) {
  Vec product{};
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t lanes = lanes_at(j, columns);
    product += load_some(static_cast<const T*>(row) + j, lanes) * load_some(floats + j, lanes);
  }
  return cpu::horizontal_sum(product);
}

// Buffers of one piece of a row, whole vectors.
struct alignas(64) Piece {
  float gates[kColumns], ups[kColumns], values[kColumns], slopes[kColumns];
};

// values = f(gates), slopes = f'(gates).
template <Kind kKind>
[[gnu::noinline]] void differentiate(Piece& piece, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const auto both = pointwise::KP_ISA_NAMESPACE::differentiate<kKind, pointwise::KP_ISA_NAMESPACE::kFloatBits>(
        cpu::load(piece.gates + j));
    cpu::store(piece.values + j, both.value);
    cpu::store(piece.slopes + j, both.derivative);
  }
}
void differentiate(Kind kind, Piece& piece, int64_t count) {
  switch (kind) {
    case Kind::kGelu:
      return differentiate<Kind::kGelu>(piece, count);
    case Kind::kGeluTanh:
      return differentiate<Kind::kGeluTanh>(piece, count);
    case Kind::kSilu:
      return differentiate<Kind::kSilu>(piece, count);
    case Kind::kRelu:
      return differentiate<Kind::kRelu>(piece, count);
    case Kind::kReluSquared:
      return differentiate<Kind::kReluSquared>(piece, count);
    case Kind::kSigmoid:
      return differentiate<Kind::kSigmoid>(piece, count);
    case Kind::kTanh:
      return differentiate<Kind::kTanh>(piece, count);
    case Kind::kIdentity:
      return differentiate<Kind::kIdentity>(piece, count);
  }
}

// Of clamped gates: values, slopes, the factor in place of the ups, and in place of the gates whether ups have a
// gradient.
void differentiate_clamped(Piece& piece, int64_t count, float limit, float slope) {
  const Vec most = cpu::broadcast(limit);
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec gate = cpu::load(piece.gates + j), up = cpu::load(piece.ups + j), g = cpu::min(most, gate);
    const Vec s = cpu::sigmoid(g * slope);
    cpu::store(piece.values + j, g * s);
    cpu::store(piece.slopes + j, cpu::select(gate <= most, s + slope * g * s * (1.0f - s), Vec{}));
    cpu::store(piece.ups + j, cpu::max(-most, cpu::min(most, up)) + 1.0f);
    cpu::store(piece.gates + j, cpu::select(cpu::abs(up) <= most, cpu::broadcast(1.0f), Vec{}));
  }
}

template <class T>
KP_PRIMITIVE void read_pairs(const ActivateTask& task, const T* from, int64_t column, int64_t count, Piece& piece) {
  if (task.is_packed || !task.is_gated) {
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t lanes = lanes_at(j, count);
      cpu::store(piece.gates + j, load_some(from + column + j, lanes));
      if (task.is_gated) cpu::store(piece.ups + j, load_some(from + task.inner + column + j, lanes));
    }
    return;
  }
  float both[2 * kLanes];
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t values = 2 * lanes_at(j, count);
    for (int half = 0; half < 2; ++half) {
      const int64_t lanes = values - half * kLanes < kLanes ? values - half * kLanes : kLanes;
      const T* at = from + 2 * (column + j) + half * kLanes;
      cpu::store(both + half * kLanes, lanes <= 0 ? Vec{} : load_some(at, lanes));
    }
    for (int i = 0; i < kLanes; ++i) {
      piece.gates[j + i] = both[2 * i];
      piece.ups[j + i] = both[2 * i + 1];
    }
  }
}

// Gradients of gates in `values` and of ups in `ups`.
template <class T>
KP_PRIMITIVE void write_pairs(const ActivateTask& task, T* to, int64_t column, int64_t count, const Piece& piece) {
  if (task.is_packed || !task.is_gated) {
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t lanes = lanes_at(j, count);
      store_some(to + column + j, cpu::load(piece.values + j), lanes);
      if (task.is_gated) store_some(to + task.inner + column + j, cpu::load(piece.ups + j), lanes);
    }
    return;
  }
  float both[2 * kLanes];
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      both[2 * i] = piece.values[j + i];
      both[2 * i + 1] = piece.ups[j + i];
    }
    const int64_t values = 2 * lanes_at(j, count);
    for (int half = 0; half < 2; ++half) {
      const int64_t lanes = values - half * kLanes < kLanes ? values - half * kLanes : kLanes;
      if (lanes > 0) store_some(to + 2 * (column + j) + half * kLanes, cpu::load(both + half * kLanes), lanes);
    }
  }
}

template <class T>
float activate(const ActivateTask& task) {
  Piece piece;
  Vec product{};
  for (int64_t column = 0; column < task.inner; column += kColumns) {
    const int64_t count = task.inner - column < kColumns ? task.inner - column : kColumns;
    read_pairs(task, static_cast<const T*>(task.preactivation), column, count, piece);
    const bool is_clamped = task.limit > 0;
    if (is_clamped) {
      differentiate_clamped(piece, count, task.limit, task.slope);
    } else {
      differentiate(task.activation, piece, count);
    }
    for (int64_t j = 0; j < count; j += kLanes) {
      const int64_t lanes = lanes_at(j, count);
      const Vec gradient = load_some(static_cast<const T*>(task.gradient) + column + j, lanes);
      const Vec value = cpu::load(piece.values + j), slope = cpu::load(piece.slopes + j);
      const Vec up = task.is_gated ? cpu::load(piece.ups + j) : cpu::broadcast(1.0f);
      const Vec weighted = gradient * task.weight, result = value * up;
      product += gradient * result;
      store_some(static_cast<T*>(task.hidden) + column + j, result * task.weight, lanes);
      cpu::store(piece.values + j, weighted * slope * up);
      if (task.is_gated) {
        const Vec passes = is_clamped ? cpu::load(piece.gates + j) : cpu::broadcast(1.0f);
        cpu::store(piece.ups + j, weighted * value * passes);
      }
    }
    write_pairs(task, static_cast<T*>(task.grad_preactivation), column, count, piece);
  }
  return cpu::horizontal_sum(product);
}

template <class T>
constexpr RowKernels kKernelsOf = {combine<T>, scale<T>, activate<T>, dot_floats<T>};

}  // namespace

extern const RowKernels kRowKernels[3];
constinit const RowKernels kRowKernels[3] = {kKernelsOf<float>, kKernelsOf<BFloat16>, kKernelsOf<Float16>};

}  // namespace kernel_pytorch::moe_mlp::KP_ISA_NAMESPACE
