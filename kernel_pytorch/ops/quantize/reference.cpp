// The reference of quantising: one element after another. Its arithmetic is the contract's, which is fp32's.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantize {
namespace {

double element_at(const TensorView& view, int64_t row, int64_t column) {
  return load_element(view.data, view.dtype, row * view.strides[0] + column * view.strides[1]);
}

// The value of what is made, in double, rounded to x's type.
void make_row(const Quantize& problem, int64_t row, const TensorView& value) {
  const int64_t columns = problem.x.sizes[1];
  const auto put = [&](int64_t column, double produced) {
    store_element(value.data, value.dtype, row * value.strides[0] + column, produced);
  };
  if (problem.source != Source::kNorm) {
    for (int64_t j = 0; j < columns; ++j) {
      const pointwise::Values at = pointwise::evaluate(problem.kind, element_at(problem.x, row, j));
      const double up = element_at(problem.up, row, j);
      if (problem.source == Source::kGate) {
        put(j, at.value * up);
        continue;
      }
      const double grad = element_at(problem.grad_output, row, j);
      put(j, grad * at.derivative * up);
      put(columns + j, grad * at.value);
    }
    return;
  }
  TensorView x = problem.x;
  if (problem.residual.is_present()) {
    x = problem.sum;
    for (int64_t j = 0; j < columns; ++j) {
      store_element(x.data, x.dtype, row * columns + j,
                    element_at(problem.x, row, j) + element_at(problem.residual, row, j));
    }
  }
  double squares = 0;
  for (int64_t j = 0; j < columns; ++j) squares += element_at(x, row, j) * element_at(x, row, j);
  const double rstd = 1 / std::sqrt(squares / static_cast<double>(columns) + problem.eps);
  if (problem.rstd.is_present()) problem.rstd.as<float>()[row] = static_cast<float>(rstd);
  for (int64_t j = 0; j < columns; ++j) {
    const double weight = problem.weight.is_present()
                              ? load_element(problem.weight.data, problem.weight.dtype, j) + problem.weight_offset
                              : 1;
    put(j, element_at(x, row, j) * rstd * weight);
  }
}

float value_at(const TensorView& x, int64_t row, int64_t column) {
  return static_cast<float>(load_element(x.data, x.dtype, row * x.strides[0] + column * x.strides[1]));
}

bool is_finite(float value) {
  return (bits_of(value) & 0x7fffffff) < kInfinityBits;
}

// The largest finite magnitude of a rectangle that ends where x does.
float amax_of(const TensorView& x, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  float amax = 0;
  for (int64_t i = row; i < std::min(row + rows, x.sizes[0]); ++i) {
    for (int64_t j = column; j < std::min(column + columns, x.sizes[1]); ++j) {
      const float value = std::fabs(value_at(x, i, j));
      if (is_finite(value)) amax = std::max(amax, value);
    }
  }
  return amax;
}

uint8_t code_of(const Quantize& problem, const Format& format, float value, int64_t place) {
  if (problem.seed.is_present()) {
    const auto* seed = problem.seed.as<const int64_t>();
    const PhiloxBlock block = philox(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]),
                                     static_cast<uint64_t>(place) / kPhiloxElements);
    return static_cast<uint8_t>(stochastic_code(value, block.bits(static_cast<int>(place % kPhiloxElements)),
                                                format.mantissa_bits, format.bias, format.largest_code));
  }
  return code_type_of(problem) == DType::kFloat8E5M2 ? from_float<Float8E5M2>(value).bits
                                                     : from_float<Float8E4M3>(value).bits;
}

// Scales of x, and its codes by them; the transpose is the same for the transposed x, at the same places.
void run_rows_or_columns(const Quantize& problem, Granularity granularity, const TensorView& x,
                         const TensorView& scales, const TensorView& codes, bool is_transposed) {
  const int64_t rows = x.sizes[0], columns = x.sizes[1];
  const bool is_blocked = granularity == Granularity::k1x128 || granularity == Granularity::k128x128;
  const int64_t row_step = granularity == Granularity::kTensor    ? std::max<int64_t>(rows, 1)
                           : granularity == Granularity::k128x128 ? kTile
                                                                  : 1;
  const int64_t column_step = is_blocked ? kTile : std::max<int64_t>(columns, 1);
  const ScaleRule rule = rule_of(problem);
  const Format format = format_of(problem);
  const bool is_given = problem.scale.is_present();
  if (!is_given && rows * columns == 0) {  // scales of nothing are 1
    for (int64_t i = 0; i < scales.sizes[0]; ++i) {
      for (int64_t j = 0; j < scales.sizes[1]; ++j) {
        scales.as<float>()[i * scales.strides[0] + j * scales.strides[1]] = 1;
      }
    }
  }
  for (int64_t row = 0; row < rows; row += row_step) {
    for (int64_t column = 0; column < columns; column += column_step) {
      const float scale =
          is_given ? *problem.scale.as<const float>() : scale_of(amax_of(x, row, column, row_step, column_step), rule);
      if (!is_given) {
        scales.as<float>()[row / row_step * scales.strides[0] + column / column_step * scales.strides[1]] = scale;
      }
      if (!codes.is_present()) continue;
      const float inverse = 1.0f / scale;
      for (int64_t i = row; i < std::min(row + row_step, rows); ++i) {
        for (int64_t j = column; j < std::min(column + column_step, columns); ++j) {
          const int64_t place = is_transposed ? j * rows + i : i * columns + j;
          codes.as<uint8_t>()[i * codes.strides[0] + j] = code_of(problem, format, value_at(x, i, j) * inverse, place);
        }
      }
    }
  }
}

void run_given(const Quantize& problem) {
  const TensorView& x = problem.x;
  TensorView across = x;
  std::swap(across.sizes[0], across.sizes[1]);
  std::swap(across.strides[0], across.strides[1]);
  run_rows_or_columns(problem, problem.granularity, x, problem.scales, problem.codes, false);
  if (problem.transposed.is_present()) {
    const bool has_own = has_transposed_scales(problem.granularity);
    TensorView shared = problem.scales;
    std::swap(shared.sizes[0], shared.sizes[1]);
    std::swap(shared.strides[0], shared.strides[1]);
    run_rows_or_columns(problem, transposed_granularity(problem), across, has_own ? problem.transposed_scales : shared,
                        problem.transposed, true);
  }
  if (problem.amax.is_present()) {
    auto& amax = *problem.amax.as<float>();
    amax = std::max(amax, amax_of(x, 0, 0, x.sizes[0], x.sizes[1]));
  }
  if (!problem.found_nonfinite.is_present()) return;
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    for (int64_t j = 0; j < x.sizes[1]; ++j) {
      if (!is_finite(value_at(x, i, j))) *problem.found_nonfinite.as<float>() = 1;
    }
  }
}

void run(const Quantize& problem, int, Context&) {
  if (!has_producer(problem)) return run_given(problem);
  const int64_t rows = problem.x.sizes[0], columns = columns_of(problem);
  std::vector<double> memory(static_cast<size_t>(rows * columns));  // of any type's alignment
  Quantize given = problem;
  given.x = problem.value.is_present()
                ? problem.value
                : contiguous_view(memory.data(), problem.x.dtype, {rows, columns}, problem.x.device);
  remove_producer(given);
  for (int64_t i = 0; i < rows; ++i) make_row(problem, i, given.x);
  run_given(given);
}

uint64_t code_version() {
  return hash_text("quantize reference 2");
}

}  // namespace

constinit const registry::Kernel<Quantize> kReference{
    .name = "reference", .supports = supports_on_cpu<Quantize>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantize
