// The reference of a product: operands widened to double (rounded first as the precision says), sums in double in the
// order of k, the rest element by element.
#include <bit>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::matmul {
namespace {

// kBf16x3 is fp32 up to an error that is the kernels' own.
double rounded(double value, Precision precision) {
  if (precision == Precision::kBf16) return to_float(from_float<BFloat16>(static_cast<float>(value)));
  if (precision != Precision::kTf32) return value;
  const auto word = std::bit_cast<uint32_t>(static_cast<float>(value)), magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return value;          // NaN
  const bool stays_finite = magnitude < 0x7f7ff000u;  // others are cut off
  return std::bit_cast<float>((stays_finite ? word + 0x1000u : word) & 0xffffe000u);
}

int64_t offset_of(const TensorView& view, int64_t batch, int64_t row, int64_t column) {
  return batch * view.strides[0] + row * view.strides[1] + column * view.strides[2];
}
double at(const TensorView& view, int64_t batch, int64_t row, int64_t column) {
  return load_element(view.data, view.dtype, offset_of(view, batch, row, column));
}
void put(const TensorView& view, int64_t batch, int64_t row, int64_t column, double value) {
  store_element(view.data, view.dtype, offset_of(view, batch, row, column), value);
}

std::vector<double> widen(const TensorView& matrix, int64_t batch, Precision precision) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(matrix.sizes[1] * matrix.sizes[2]));
  for (int64_t i = 0; i < matrix.sizes[1]; ++i) {
    for (int64_t j = 0; j < matrix.sizes[2]; ++j) values.push_back(rounded(at(matrix, batch, i, j), precision));
  }
  return values;
}

// Gates and ups in turns.
std::vector<double> interleave(const std::vector<double>& gates, const std::vector<double>& ups) {
  std::vector<double> values;
  values.reserve(2 * gates.size());
  for (size_t i = 0; i < gates.size(); ++i) values.insert(values.end(), {gates[i], ups[i]});
  return values;
}

// `v` is a row of the product with its bias.
void write_row(const Product& problem, int64_t batch, int64_t row, const std::vector<double>& v) {
  const auto write = [&](int64_t column, double value) {
    if (problem.residual.is_present()) value += problem.beta * at(problem.residual, batch, row, column);
    put(problem.output, batch, row, column, value);
  };
  const auto saved = [&](int64_t column) { return at(problem.saved, batch, row, column); };
  const auto f = [&](double x) { return pointwise::evaluate(problem.activation, x); };
  const int64_t sums = static_cast<int64_t>(v.size()), columns = is_gated(problem.form) ? sums / 2 : sums;
  for (int64_t j = 0; j < columns; ++j) {
    const double value = v[static_cast<size_t>(is_gated(problem.form) ? 2 * j : j)];
    switch (problem.form) {
      case Form::kPlain:
        write(j, f(value).value);
        break;
      case Form::kGated:
      case Form::kGatedTwice:
        write(j, f(value).value * v[static_cast<size_t>(2 * j + 1)]);
        break;
      case Form::kGradient:
        write(j, value * f(saved(j)).derivative);
        break;
      case Form::kGatedGradient:
        write(2 * j, value * saved(2 * j + 1) * f(saved(2 * j)).derivative);
        write(2 * j + 1, value * f(saved(2 * j)).value);
        break;
    }
  }
}

void run_row(const Product& problem, int64_t batch, int64_t row, const std::vector<double>& a,
             const std::vector<double>& b) {
  const Sizes sizes = sizes_of(problem);
  std::vector<double> v(static_cast<size_t>(sizes.n));
  double row_sum = 0;
  for (int64_t k = 0; k < sizes.k; ++k) {
    const double factor = a[static_cast<size_t>(row * sizes.k + k)];
    const double* values = b.data() + k * sizes.n;
    for (int64_t j = 0; j < sizes.n; ++j) v[static_cast<size_t>(j)] += factor * values[j];
    row_sum += at(problem.a, batch, row, k);
  }
  for (int64_t j = 0; j < sizes.n; ++j) {
    double& value = v[static_cast<size_t>(j)];
    value *= problem.alpha;
    if (problem.bias.is_present()) value += load_element(problem.bias.data, problem.bias.dtype, j);
    if (problem.preactivation.is_present()) put(problem.preactivation, batch, row, j, value);
  }
  if (problem.row_sums.is_present()) {
    store_element(problem.row_sums.data, problem.row_sums.dtype, batch * sizes.m + row, row_sum);
  }
  write_row(problem, batch, row, v);
}

void run(const Product& problem, int, Context& context) {
  const Sizes sizes = sizes_of(problem);
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const std::vector<double> a = widen(problem.a, batch, problem.precision);
    std::vector<double> b = widen(problem.b, batch, problem.precision);
    if (problem.up.is_present()) b = interleave(b, widen(problem.up, batch, problem.precision));
    parallel_for(context.threads, sizes.m, [&](int64_t row) { run_row(problem, batch, row, a, b); });
  }
}

uint64_t code_version() {
  return hash_text("matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::matmul
