// The epilogue of a product on lanes: rows of fp32 sums become rows of the output. Types and activations are asked for
// once per vector and row, which costs nothing compared with a GEMM. For *_isa.cpp only.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/matmul/cpu/tiles.h"

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {

using cpu::kLanes;
using cpu::Vec;
using pointwise::Kind;

inline constexpr int64_t kEpilogueColumns = 256;  // at a time, in buffers on the stack

KP_PRIMITIVE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
KP_PRIMITIVE int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}
KP_PRIMITIVE char* place(const Rows& rows, int64_t row, int64_t column) {
  return static_cast<char*>(rows.data) + (row * rows.stride + column) * bytes_of(rows.dtype);
}

KP_PRIMITIVE int64_t output_column(Form form, int64_t column) {
  return form == Form::kGated ? column / 2 : form == Form::kGatedGradient ? 2 * column : column;
}

// Calls use(T{}) for the element type.
template <class Use>
KP_PRIMITIVE void with_type(DType dtype, const Use& use) {
  if (dtype == DType::kFloat32) {
    use(float{});
  } else if (dtype == DType::kBFloat16) {
    use(BFloat16{});
  } else {
    use(Float16{});
  }
}

// A row of any type as floats, zeros up to whole vectors.
KP_PRIMITIVE void widen_row(const void* from, DType dtype, int64_t count, float* to) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const T* row = static_cast<const T*>(from);
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) cpu::store(to + j, cpu::load(row + j));
    if (j < count) cpu::store(to + j, cpu::load_partial(row + j, count - j));
  });
}
KP_PRIMITIVE void narrow_row(const float* from, int64_t count, void* to, DType dtype) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    T* row = static_cast<T*>(to);
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) cpu::store(row + j, cpu::load(from + j));
    if (j < count) cpu::store_partial(row + j, cpu::load(from + j), count - j);
  });
}

template <Kind kKind>
[[gnu::noinline]] static void take_values(float* x, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    cpu::store(x + j,
               pointwise::KP_ISA_NAMESPACE::function<kKind, pointwise::KP_ISA_NAMESPACE::kFloatBits>(cpu::load(x + j)));
  }
}
template <Kind kKind>
[[gnu::noinline]] static void take_both(float* x, float* slopes, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const auto both =
        pointwise::KP_ISA_NAMESPACE::differentiate<kKind, pointwise::KP_ISA_NAMESPACE::kFloatBits>(cpu::load(x + j));
    cpu::store(x + j, both.value);
    cpu::store(slopes + j, both.derivative);
  }
}

// x becomes f(x), and slopes f'(x) where it is not null; up to whole vectors.
KP_PRIMITIVE void activate(Kind kind, float* x, float* slopes, int64_t count) {
  const auto take = [&](auto values, auto both) { slopes == nullptr ? values(x, count) : both(x, slopes, count); };
  switch (kind) {
    case Kind::kGelu:
      return take(take_values<Kind::kGelu>, take_both<Kind::kGelu>);
    case Kind::kGeluTanh:
      return take(take_values<Kind::kGeluTanh>, take_both<Kind::kGeluTanh>);
    case Kind::kSilu:
      return take(take_values<Kind::kSilu>, take_both<Kind::kSilu>);
    case Kind::kRelu:
      return take(take_values<Kind::kRelu>, take_both<Kind::kRelu>);
    case Kind::kReluSquared:
      return take(take_values<Kind::kReluSquared>, take_both<Kind::kReluSquared>);
    case Kind::kSigmoid:
      return take(take_values<Kind::kSigmoid>, take_both<Kind::kSigmoid>);
    case Kind::kTanh:
      return take(take_values<Kind::kTanh>, take_both<Kind::kTanh>);
    case Kind::kIdentity:
      return take(take_values<Kind::kIdentity>, take_both<Kind::kIdentity>);
  }
}

// Buffers of a row; pairs take twice as many columns.
struct alignas(64) EpilogueRow {
  float v[kEpilogueColumns];
  float saved[2 * kEpilogueColumns];
  float slopes[kEpilogueColumns];
  float result[2 * kEpilogueColumns];
};

KP_PRIMITIVE void split_pairs(const float* pairs, int64_t count, float* first, float* second) {
  for (int64_t j = 0; j < count; ++j) {
    first[j] = pairs[2 * j];
    second[j] = pairs[2 * j + 1];
  }
}

// gradient * up * f'(gate) and gradient * f(gate) side by side, of pairs (gate, up) in `row.saved`.
KP_PRIMITIVE void gradient_of_pairs(EpilogueRow& row, Kind kind, const float* gradient, int64_t count) {
  float up[kEpilogueColumns], gate[kEpilogueColumns];
  split_pairs(row.saved, count, gate, up);
  for (int64_t j = count; j < kEpilogueColumns && j % kLanes != 0; ++j) gate[j] = 0;
  activate(kind, gate, row.slopes, count);
  for (int64_t j = 0; j < count; ++j) {
    row.result[2 * j] = gradient[j] * up[j] * row.slopes[j];
    row.result[2 * j + 1] = gradient[j] * gate[j];
  }
}

// Columns [column, column + count) of a row of sums, count <= kEpilogueColumns.
KP_PRIMITIVE void finish_columns(const Epilogue& epilogue, EpilogueRow& row, const float* sums, int64_t index,
                                 int64_t column, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec sum = j + kLanes <= count ? cpu::load(sums + j) : cpu::load_partial(sums + j, count - j);
    cpu::store(row.v + j, sum * epilogue.alpha);
  }
  if (epilogue.bias != nullptr) {
    widen_row(static_cast<const char*>(epilogue.bias) + column * bytes_of(epilogue.bias_dtype), epilogue.bias_dtype,
              count, row.result);
    for (int64_t j = 0; j < count; j += kLanes) cpu::store(row.v + j, cpu::load(row.v + j) + cpu::load(row.result + j));
  }
  if (epilogue.preactivation.data != nullptr) {
    narrow_row(row.v, count, place(epilogue.preactivation, index, column), epilogue.preactivation.dtype);
  }
  const float* result = row.v;
  int64_t first = column, results = count;
  switch (epilogue.form) {
    case Form::kPlain:
      if (epilogue.activation != Kind::kIdentity) activate(epilogue.activation, row.v, nullptr, count);
      break;
    case Form::kGated:
      first = column / 2;
      results = count / 2;
      split_pairs(row.v, results, row.result, row.saved);
      for (int64_t j = results; j % kLanes != 0; ++j) row.result[j] = 0;
      activate(epilogue.activation, row.result, nullptr, results);
      for (int64_t j = 0; j < results; ++j) row.result[j] *= row.saved[j];
      result = row.result;
      break;
    case Form::kGradient:
      widen_row(place(epilogue.saved, index, column), epilogue.saved.dtype, count, row.saved);
      activate(epilogue.activation, row.saved, row.slopes, count);
      for (int64_t j = 0; j < count; j += kLanes) {
        cpu::store(row.v + j, cpu::load(row.v + j) * cpu::load(row.slopes + j));
      }
      break;
    case Form::kGatedGradient:
      first = 2 * column;
      results = 2 * count;
      widen_row(place(epilogue.saved, index, first), epilogue.saved.dtype, results, row.saved);
      gradient_of_pairs(row, epilogue.activation, row.v, count);
      result = row.result;
      break;
    case Form::kGatedTwice:  // no CPU kernel takes it
      break;
  }
  if (epilogue.residual.data != nullptr) {
    widen_row(place(epilogue.residual, index, first), epilogue.residual.dtype, results, row.saved);
    for (int64_t j = 0; j < results; j += kLanes) {
      cpu::store(row.result + j, cpu::load(result + j) + epilogue.beta * cpu::load(row.saved + j));
    }
    result = row.result;
  }
  narrow_row(result, results, place(epilogue.output, index, first), epilogue.output.dtype);
}

// Sums that are the output, but for a factor.
KP_PRIMITIVE bool is_copy(const Epilogue& epilogue) {
  return epilogue.form == Form::kPlain && epilogue.activation == Kind::kIdentity && epilogue.bias == nullptr &&
         epilogue.residual.data == nullptr && epilogue.preactivation.data == nullptr;
}

KP_PRIMITIVE void copy_row(const float* from, int64_t count, float factor, float* to) {
  int64_t j = 0;
  if (cpu::elements_to_alignment(to, 64) == 0) {
    for (; j + kLanes <= count; j += kLanes) cpu::stream(to + j, cpu::load(from + j) * factor);
  }
  for (; j + kLanes <= count; j += kLanes) cpu::store(to + j, cpu::load(from + j) * factor);
  if (j < count) cpu::store_partial(to + j, cpu::load_partial(from + j, count - j) * factor, count - j);
}

// Whether everything is fp32 and a column of the sums one of the output.
KP_PRIMITIVE bool is_simple(const Epilogue& epilogue) {
  const auto is_float = [](const void* data, DType dtype) { return data == nullptr || dtype == DType::kFloat32; };
  return epilogue.form == Form::kPlain && epilogue.preactivation.data == nullptr &&
         is_float(epilogue.output.data, epilogue.output.dtype) && is_float(epilogue.bias, epilogue.bias_dtype) &&
         is_float(epilogue.residual.data, epilogue.residual.dtype);
}

// Up to kEpilogueColumns / kLanes rows of one vector of such columns: in registers but for the activation.
KP_PRIMITIVE void finish_simple(const Epilogue& epilogue, EpilogueRow& row, const float* sums, int64_t stride,
                                int64_t index, int64_t rows, int64_t column, int64_t lanes) {
  const auto at = [&](const float* from) { return lanes >= kLanes ? cpu::load(from) : cpu::load_partial(from, lanes); };
  const bool activates = epilogue.activation != Kind::kIdentity;
  const Vec bias = epilogue.bias == nullptr ? Vec{} : at(static_cast<const float*>(epilogue.bias) + column);
  const auto* residual = reinterpret_cast<const float*>(place(epilogue.residual, index, column));
  auto* to = reinterpret_cast<float*>(place(epilogue.output, index, column));
  if (activates) {
    for (int64_t i = 0; i < rows; ++i) cpu::store(row.v + i * kLanes, at(sums + i * stride) * epilogue.alpha + bias);
    activate(epilogue.activation, row.v, nullptr, rows * kLanes);
  }
  for (int64_t i = 0; i < rows; ++i) {
    Vec v = activates ? cpu::load(row.v + i * kLanes) : at(sums + i * stride) * epilogue.alpha + bias;
    if (epilogue.residual.data != nullptr) v += epilogue.beta * at(residual + i * epilogue.residual.stride);
    float* line = to + i * epilogue.output.stride;
    lanes >= kLanes ? cpu::store(line, v) : cpu::store_partial(line, v, lanes);
  }
}

// Rows [first_row, first_row + rows) and columns [first_column, ...) of a task; the sums begin with the first of them.
KP_PRIMITIVE void finish_tile(const Epilogue& epilogue, const float* sums, int64_t stride, int64_t first_row,
                              int64_t rows, int64_t first_column, int64_t columns) {
  const bool copies = epilogue.streams && is_copy(epilogue) && epilogue.output.dtype == DType::kFloat32;
  EpilogueRow row;
  if (!copies && is_simple(epilogue)) {
    constexpr int64_t kRows = kEpilogueColumns / kLanes;
    for (int64_t i = 0; i < rows; i += kRows) {
      for (int64_t j = 0; j < columns; j += kLanes) {
        finish_simple(epilogue, row, sums + i * stride + j, stride, first_row + i, smaller(kRows, rows - i),
                      first_column + j, smaller(kLanes, columns - j));
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = sums + i * stride;
    if (copies) {
      auto* to = reinterpret_cast<float*>(place(epilogue.output, first_row + i, first_column));
      copy_row(from, columns, epilogue.alpha, to);
      continue;
    }
    for (int64_t column = 0; column < columns; column += kEpilogueColumns) {
      finish_columns(epilogue, row, from + column, first_row + i, first_column + column,
                     smaller(kEpilogueColumns, columns - column));
    }
  }
}

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE
