// The reference: scalar, in double, one row after another, any strides. What every other kernel is tested against and
// the last one in the lists, so it is written to be read.
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::softmax {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double at(const TensorView& view, int64_t start, int64_t column) {
  return load_element(view.data, view.dtype, start + column * view.stride(-1));
}

double score_at(const ForwardProblem& problem, int64_t row, int64_t column) {
  if (problem.causal && column >= causal_columns(row, problem.queries, columns_of(problem.x))) return kMinusInfinity;
  const double score = problem.scale * at(problem.x, row_offset(problem.x, row), column);
  if (!problem.mask.is_present()) return score;
  const double mask = at(problem.mask, row_offset(problem.mask, row), column);
  if (problem.mask.dtype == DType::kBool) return mask != 0 ? score : kMinusInfinity;
  return score + mask;
}

void forward_row(const ForwardProblem& problem, int64_t row, std::vector<double>& scores) {
  const int64_t columns = columns_of(problem.x), start = row_offset(problem.output, row);
  double largest = kMinusInfinity;
  for (int64_t j = 0; j < columns; ++j) {
    scores[j] = score_at(problem, row, j);
    largest = std::isnan(scores[j]) ? scores[j] : std::max(scores[j], largest);
    if (std::isnan(largest)) break;  // the whole row is NaN
  }
  const bool is_empty = largest == kMinusInfinity && removes_scores(problem);
  double sum = 0;
  for (int64_t j = 0; j < columns; ++j) sum += std::exp(scores[j] - largest);
  for (int64_t j = 0; j < columns; ++j) {
    const double value = is_empty      ? (problem.log ? kMinusInfinity : 0)
                         : problem.log ? scores[j] - largest - std::log(sum)
                                       : std::exp(scores[j] - largest) / sum;
    store_element(problem.output.data, problem.output.dtype, start + j, value);
  }
}

void run_forward(const ForwardProblem& problem, int, Context&) {
  std::vector<double> scores(static_cast<size_t>(columns_of(problem.x)));
  for (int64_t row = 0; row < rows_of(problem.x); ++row) forward_row(problem, row, scores);
}

void run_backward(const BackwardProblem& problem, int, Context&) {
  const int64_t columns = columns_of(problem.output);
  std::vector<double> gradients(static_cast<size_t>(columns));
  for (int64_t row = 0; row < rows_of(problem.output); ++row) {
    const int64_t output_start = row_offset(problem.output, row), grad_start = row_offset(problem.grad_output, row);
    const auto is_removed = [&](double output) { return problem.masked && problem.log && output == kMinusInfinity; };
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double output = at(problem.output, output_start, j), gradient = at(problem.grad_output, grad_start, j);
      sum += problem.log ? gradient : gradient * output;
    }
    for (int64_t j = 0; j < columns; ++j) {
      const double output = at(problem.output, output_start, j), gradient = at(problem.grad_output, grad_start, j);
      const double value = problem.log ? gradient - std::exp(output) * sum : output * (gradient - sum);
      gradients[j] = is_removed(output) ? 0 : problem.scale * value;
    }
    const int64_t start = row_offset(problem.grad_input, row);
    for (int64_t j = 0; j < columns; ++j) {
      store_element(problem.grad_input.data, problem.grad_input.dtype, start + j, gradients[j]);
    }
  }
}

uint64_t code_version() {
  return hash_text("softmax reference 1");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<ForwardProblem>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardReference{.name = "reference",
                                                                     .supports = supports_on_cpu<BackwardProblem>,
                                                                     .run = run_backward,
                                                                     .source_hash = code_version};

}  // namespace kernel_pytorch::softmax
