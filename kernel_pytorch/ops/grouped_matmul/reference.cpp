// The references of the grouped products: scalar, in double, any strides.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

double at(const TensorView& view, int64_t row, int64_t column) {
  return load_element(view.data, view.dtype, row * view.strides[0] + column * view.strides[1]);
}
int64_t line_of(const TensorView& gather, int64_t row) {
  return gather.is_present() ? gather.as<const int32_t>()[row] : row;
}

double gated(const Product& problem, double gate, double up) {
  if (problem.limit == 0) return pointwise::evaluate(problem.activation, gate).value * up;
  const double g = std::min(gate, problem.limit), u = std::clamp(up, -problem.limit, problem.limit);
  return g / (1 + std::exp(-problem.slope * g)) * (u + 1);
}

void finish_row(const Product& problem, int64_t row, const std::vector<double>& v) {
  const auto n = static_cast<int64_t>(v.size());
  const TensorView &output = problem.output, &preactivation = problem.preactivation;
  for (int64_t j = 0; preactivation.is_present() && j < n; ++j) {
    store_element(preactivation.data, preactivation.dtype, row * preactivation.strides[0] + j, v[j]);
  }
  for (int64_t j = 0; j < output.sizes[1]; ++j) {
    const double value = problem.form == Form::kPlain   ? pointwise::evaluate(problem.activation, v[j]).value
                         : problem.form == Form::kGated ? gated(problem, v[2 * j], v[2 * j + 1])
                                                        : gated(problem, v[j], v[n / 2 + j]);
    store_element(output.data, output.dtype, row * output.strides[0] + j, value);
  }
}

void clear_row(const TensorView& view, int64_t row) {
  for (int64_t j = 0; view.is_present() && j < view.sizes[1]; ++j) {
    store_element(view.data, view.dtype, row * view.strides[0] + j, 0);
  }
}

void run_multiply(const Product& problem, int, Context&) {
  const int64_t groups = problem.b.sizes[0], k = problem.b.sizes[1], n = problem.b.sizes[2];
  int64_t end = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const Range range = range_of(problem.offsets, group);
    end = range.end;
    for (int64_t row = range.begin; row < range.end; ++row) {
      std::vector<double> v(static_cast<size_t>(n));
      for (int64_t j = 0; j < n; ++j) {
        if (problem.bias.is_present()) v[j] = at(problem.bias, group, j);
        for (int64_t i = 0; i < k; ++i) {
          const int64_t place = group * problem.b.strides[0] + i * problem.b.strides[1] + j * problem.b.strides[2];
          v[j] += at(problem.a, line_of(problem.gather, row), i) * load_element(problem.b.data, problem.b.dtype, place);
        }
      }
      finish_row(problem, row, v);
    }
  }
  for (int64_t row = end; row < rows_of(problem); ++row) {
    clear_row(problem.output, row);
    clear_row(problem.preactivation, row);
  }
}

void run_weight(const WeightGradient& problem, int, Context&) {
  const TensorView& output = problem.output;
  for (int64_t group = 0; group < output.sizes[0]; ++group) {
    const Range range = range_of(problem.offsets, group);
    for (int64_t m = 0; m < output.sizes[1]; ++m) {
      for (int64_t n = 0; n < output.sizes[2]; ++n) {
        double sum = 0;
        for (int64_t row = range.begin; row < range.end; ++row) {
          sum += at(problem.a, line_of(problem.gather_a, row), m) * at(problem.b, line_of(problem.gather_b, row), n);
        }
        store_element(output.data, output.dtype,
                      group * output.strides[0] + m * output.strides[1] + n * output.strides[2], sum);
      }
    }
  }
}

void run_sums(const Sums& problem, int, Context&) {
  const int64_t n = problem.x.sizes[1];
  for (int64_t group = 0; group < problem.output.sizes[0]; ++group) {
    const Range range = range_of(problem.offsets, group);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t row = range.begin; row < range.end; ++row) {
        const TensorView& factors = problem.factors;
        const double factor = factors.is_present() ? load_element(factors.data, factors.dtype, row) : 1;
        sum += factor * at(problem.x, line_of(problem.gather, row), j);
      }
      store_element(problem.output.data, problem.output.dtype, group * n + j, sum);
    }
  }
}

uint64_t code_version() {
  return hash_text("grouped_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run_multiply, .source_hash = code_version};
constinit const registry::Kernel<WeightGradient> kWeightReference{
    .name = "reference", .supports = supports_on_cpu<WeightGradient>, .run = run_weight, .source_hash = code_version};
constinit const registry::Kernel<Sums> kSumsReference{
    .name = "reference", .supports = supports_on_cpu<Sums>, .run = run_sums, .source_hash = code_version};

}  // namespace kernel_pytorch::grouped_matmul
