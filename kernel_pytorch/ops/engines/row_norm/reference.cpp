// The reference of both norms: scalar, in double, one row after another, any strides. It is what every other kernel is
// tested against and the last one in the lists, so it is written to be read.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::row_norm {
namespace {

struct RowOf {
  const TensorView& view;
  int64_t start;
  RowOf(const TensorView& of, int64_t row) : view(of), start(of.is_present() ? row_offset(of, row) : 0) {}
  double operator[](int64_t column) const {
    return load_element(view.data, view.dtype, start + column * view.stride(-1));
  }
  void store(int64_t column, double value) const {
    store_element(view.data, view.dtype, start + column * view.stride(-1), value);
  }
};

double at(const TensorView& vector, int64_t index, double absent) {
  return vector.is_present() ? load_element(vector.data, vector.dtype, index * vector.stride(-1)) : absent;
}

double weight_at(const TensorView& weight, int64_t column, double offset) {
  return weight.is_present() ? at(weight, column, 0) + offset : 1.0;
}

void forward_row(const ForwardProblem& problem, int64_t row, std::vector<double>& value) {
  const int64_t columns = columns_of(problem.x);
  const RowOf x(problem.x, row), residual(problem.residual, row), output(problem.output, row), sum(problem.sum, row);
  for (int64_t j = 0; j < columns; ++j) {
    value[j] = x[j];
    if (!problem.residual.is_present()) continue;
    sum.store(j, x[j] + residual[j]);
    value[j] = sum[j];  // the norm sees what the sum output holds, rounded
  }
  double mean = 0;
  if (problem.norm == Norm::kLayer && columns > 0) {  // around the first value: exact where all are equal
    for (int64_t j = 0; j < columns; ++j) mean += value[j] - value[0];
    mean = value[0] + mean / static_cast<double>(columns);
  }
  double squares = 0;
  for (int64_t j = 0; j < columns; ++j) squares += (value[j] - mean) * (value[j] - mean);
  const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(columns) + *problem.eps);
  for (int64_t j = 0; j < columns; ++j) {
    const double scaled =
        (value[j] - mean) * rstd * weight_at(problem.weight, j, problem.weight_offset) + at(problem.bias, j, 0);
    output.store(j, pointwise::evaluate(problem.activation, scaled).value);
  }
  if (problem.mean.is_present()) store_element(problem.mean.data, problem.mean.dtype, row, mean);
  if (problem.rstd.is_present()) store_element(problem.rstd.data, problem.rstd.dtype, row, rstd);
}

void run_forward(const ForwardProblem& problem, int, Context&) {
  std::vector<double> value(static_cast<size_t>(columns_of(problem.x)));
  for (int64_t row = 0; row < rows_of(problem.x); ++row) forward_row(problem, row, value);
}

struct ColumnSums {
  std::vector<double> weight, bias;
};

void backward_row(const BackwardProblem& problem, int64_t row, ColumnSums& sums) {
  const int64_t columns = columns_of(problem.value);
  const RowOf grad_output(problem.grad_output, row), value(problem.value, row), grad_sum(problem.grad_sum, row),
      grad_input(problem.grad_input, row);
  const double rstd = at(problem.rstd, row, 0);
  const double mean = problem.norm == Norm::kLayer ? at(problem.mean, row, 0) : 0;
  double mean_g = 0, mean_g_normal = 0;  // g = grad_output * weight
  for (int64_t j = 0; j < columns; ++j) {
    const double normal = (value[j] - mean) * rstd;
    const double g = grad_output[j] * weight_at(problem.weight, j, problem.weight_offset);
    mean_g += g;
    mean_g_normal += g * normal;
    sums.weight[j] += grad_output[j] * normal;
    sums.bias[j] += grad_output[j];
  }
  if (!problem.grad_input.is_present()) return;
  mean_g = problem.norm == Norm::kLayer ? mean_g / static_cast<double>(columns) : 0;
  mean_g_normal /= static_cast<double>(columns);
  for (int64_t j = 0; j < columns; ++j) {
    const double normal = (value[j] - mean) * rstd;
    const double g = grad_output[j] * weight_at(problem.weight, j, problem.weight_offset);
    const double through = problem.grad_sum.is_present() ? grad_sum[j] : 0;
    grad_input.store(j, rstd * (g - mean_g - normal * mean_g_normal) + through);
  }
}

void run_backward(const BackwardProblem& problem, int, Context&) {
  const int64_t columns = columns_of(problem.value);
  ColumnSums sums{std::vector<double>(columns), std::vector<double>(columns)};
  for (int64_t row = 0; row < rows_of(problem.value); ++row) backward_row(problem, row, sums);
  for (int64_t j = 0; j < columns; ++j) {
    if (problem.grad_weight.is_present()) {
      store_element(problem.grad_weight.data, problem.grad_weight.dtype, j, sums.weight[j]);
    }
    if (problem.grad_bias.is_present()) {
      store_element(problem.grad_bias.data, problem.grad_bias.dtype, j, sums.bias[j]);
    }
  }
}

uint64_t code_version() {
  return hash_text("row_norm reference 3");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<ForwardProblem>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardReference{.name = "reference",
                                                                     .supports = supports_on_cpu<BackwardProblem>,
                                                                     .run = run_backward,
                                                                     .source_hash = code_version};

}  // namespace kernel_pytorch::row_norm
