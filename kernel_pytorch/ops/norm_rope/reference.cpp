// Scalar, in double: what every other kernel is tested against.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/norm_rope/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::norm_rope {
namespace {

// One head of one token.
struct Head {
  int64_t batch, place, head;
};

template <class Problem>
int64_t offset_of(const Problem& problem, const TensorView& view, const Head& at, int64_t column) {
  return at.batch * view.strides[0] + at.place * view.strides[sequence_dimension(problem)] +
         at.head * view.strides[head_dimension(problem)] + column * view.strides[3];
}

template <class Problem>
std::vector<double> load_head(const Problem& problem, const TensorView& view, const Head& at) {
  std::vector<double> values(static_cast<size_t>(problem.x.sizes[3]));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(view.data, view.dtype, offset_of(problem, view, at, static_cast<int64_t>(i)));
  }
  return values;
}

template <class Problem>
void store_head(const Problem& problem, const TensorView& view, const Head& at, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    store_element(view.data, view.dtype, offset_of(problem, view, at, static_cast<int64_t>(i)), values[i]);
  }
}

double table_value(const TensorView& table, const Head& at, int64_t pair) {
  const int64_t start = at.batch * table_batch_stride(table) + at.place * table_row_stride(table);
  return load_element(table.data, table.dtype, start + pair * table.stride(-1));
}

template <class Problem>
void turn(const Problem& problem, const Head& at, double direction, std::vector<double>& values) {
  const int64_t pairs = problem.rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const double cosine = table_value(problem.cos, at, i), sine = direction * table_value(problem.sin, at, i);
    const double first = values[i], second = values[i + pairs];
    values[i] = first * cosine - second * sine;
    values[i + pairs] = second * cosine + first * sine;
  }
}

template <class Problem>
double scale_of(const Problem& problem, int64_t column) {
  if (!problem.weight.is_present()) return 1;
  return load_element(problem.weight.data, problem.weight.dtype, column * problem.weight.strides[0]) +
         problem.weight_offset;
}

template <class Problem>
double rstd_of(const Problem& problem, const std::vector<double>& x) {
  double squares = 0;
  for (double value : x) squares += value * value;
  return 1 / std::sqrt(squares / static_cast<double>(x.size()) + problem.eps);
}

template <class Problem, class Body>
void for_each_head(const Problem& problem, const Body& body) {
  const auto& sizes = problem.x.sizes;
  if (sizes[3] == 0) return;
  for (int64_t batch = 0; batch < sizes[0]; ++batch) {
    for (int64_t place = 0; place < sizes[sequence_dimension(problem)]; ++place) {
      for (int64_t head = 0; head < sizes[head_dimension(problem)]; ++head) body(Head{batch, place, head});
    }
  }
}

void run_forward(const Forward& problem, int, Context&) {
  for_each_head(problem, [&](const Head& at) {
    std::vector<double> values = load_head(problem, problem.x, at);
    const double rstd = rstd_of(problem, values);
    for (size_t i = 0; i < values.size(); ++i) values[i] *= rstd * scale_of(problem, static_cast<int64_t>(i));
    turn(problem, at, 1, values);
    store_head(problem, problem.output, at, values);
  });
}

void run_backward(const Backward& problem, int, Context&) {
  const auto columns = static_cast<size_t>(problem.x.sizes[3]);
  std::vector<double> weight_sums(columns, 0);
  for_each_head(problem, [&](const Head& at) {
    const std::vector<double> x = load_head(problem, problem.x, at);
    std::vector<double> gradient = load_head(problem, problem.grad_output, at);
    turn(problem, at, -1, gradient);
    const double rstd = rstd_of(problem, x);
    double along = 0;
    for (size_t i = 0; i < columns; ++i) {
      weight_sums[i] += gradient[i] * x[i] * rstd;
      gradient[i] *= scale_of(problem, static_cast<int64_t>(i));
      along += gradient[i] * x[i] * rstd;
    }
    along /= static_cast<double>(columns);
    for (size_t i = 0; i < columns; ++i) gradient[i] = rstd * (gradient[i] - x[i] * rstd * along);
    if (problem.grad_x.is_present()) store_head(problem, problem.grad_x, at, gradient);
  });
  const TensorView& total = problem.grad_weight;
  if (!total.is_present()) return;
  for (size_t i = 0; i < columns; ++i) {
    store_element(total.data, total.dtype, static_cast<int64_t>(i) * total.strides[0], weight_sums[i]);
  }
}

uint64_t code_version() {
  return hash_text("norm_rope reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::norm_rope
