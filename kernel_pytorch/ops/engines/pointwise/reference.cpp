// The reference of the pointwise ops: scalar, in double, one element after another, any strides.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::pointwise {
namespace {

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

Values gelu(double x) {
  const double below = std::erfc(-x * M_SQRT1_2) / 2;  // probability of a normal variable below x
  const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
  return {x * below, below + x * density};
}

Values gelu_tanh(double x) {
  const double slope = std::sqrt(2 / M_PI);
  const double t = std::tanh(slope * (x + 0.044715 * x * x * x));
  const double inner = slope * (1 + 3 * 0.044715 * x * x);
  return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * inner / 2};
}

// Not max(): a NaN is handed on.
double relu(double x) {
  return x <= 0 ? 0 : x;
}

}  // namespace

Values evaluate(Kind kind, double x) {
  switch (kind) {
    case Kind::kGelu:
      return gelu(x);
    case Kind::kGeluTanh:
      return gelu_tanh(x);
    case Kind::kSilu:
      return {x * sigmoid(x), sigmoid(x) * (1 + x * (1 - sigmoid(x)))};
    case Kind::kRelu:
      return {relu(x), x <= 0 ? 0.0 : 1.0};
    case Kind::kReluSquared:
      return {relu(x) * relu(x), 2 * relu(x)};
    case Kind::kSigmoid:
      return {sigmoid(x), sigmoid(x) * (1 - sigmoid(x))};
    case Kind::kTanh:
      return {std::tanh(x), 1 - std::tanh(x) * std::tanh(x)};
    case Kind::kIdentity:
      return {x, 1};
  }
  fail(ErrorCode::kInternal, "pointwise: no function ", static_cast<int>(kind));
}

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

double bias_at(const TensorView& bias, int64_t column) {
  return bias.is_present() ? load_element(bias.data, bias.dtype, column) : 0;
}

// What dropout multiplies an element with.
class Dropout {
 public:
  Dropout(double probability, const TensorView& seed) : probability_(probability) {
    if (probability > 0) seed_ = seed.as<int64_t>()[0], offset_ = seed.as<int64_t>()[1];
  }
  double operator()(int64_t element, double value) const {
    if (probability_ == 0) return value;
    const PhiloxBlock block = philox(static_cast<uint64_t>(seed_), static_cast<uint64_t>(offset_),
                                     static_cast<uint64_t>(element / kPhiloxElements));
    const uint32_t bits = block.bits(static_cast<int>(element % kPhiloxElements));
    return bits < dropout_threshold(probability_) ? 0 : value * static_cast<double>(dropout_scale(probability_));
  }

 private:
  double probability_;
  int64_t seed_ = 0, offset_ = 0;
};

void run_forward(const ForwardProblem& problem, int, Context&) {
  const int64_t columns = columns_of(problem.gate);
  if (problem.gate.element_count() == 0) return;
  const Dropout dropout(problem.dropout, problem.seed);
  for (int64_t row = 0; row < rows_of(problem.gate); ++row) {
    const RowOf gate(problem.gate, row), up(problem.up, row), residual(problem.residual, row),
        output(problem.output, row);
    for (int64_t j = 0; j < columns; ++j) {
      double value = evaluate(problem.kind, gate[j] + bias_at(problem.gate_bias, j)).value;
      if (problem.up.is_present()) value *= up[j] + bias_at(problem.up_bias, j);
      value = dropout(row * columns + j, value);
      output.store(j, problem.residual.is_present() ? value + residual[j] : value);
    }
  }
}

void store_sums(const TensorView& total, const std::vector<double>& sums) {
  if (!total.is_present()) return;
  for (size_t j = 0; j < sums.size(); ++j) store_element(total.data, total.dtype, static_cast<int64_t>(j), sums[j]);
}

void run_backward(const BackwardProblem& problem, int, Context&) {
  const int64_t columns = columns_of(problem.gate), rows = columns == 0 ? 0 : rows_of(problem.gate);
  std::vector<double> gate_sums(static_cast<size_t>(columns)), up_sums(static_cast<size_t>(columns));
  const Dropout dropout(rows == 0 ? 0 : problem.dropout, problem.seed);
  for (int64_t row = 0; row < rows; ++row) {
    const RowOf grad_output(problem.grad_output, row), gate(problem.gate, row), up(problem.up, row),
        grad_gate(problem.grad_gate, row), grad_up(problem.grad_up, row);
    for (int64_t j = 0; j < columns; ++j) {
      const double gradient = dropout(row * columns + j, grad_output[j]);
      const Values at = evaluate(problem.kind, gate[j] + bias_at(problem.gate_bias, j));
      double through_gate = gradient * at.derivative;
      if (problem.up.is_present()) {
        through_gate *= up[j] + bias_at(problem.up_bias, j);
        grad_up.store(j, gradient * at.value);
        up_sums[static_cast<size_t>(j)] += gradient * at.value;
      }
      grad_gate.store(j, through_gate);
      gate_sums[static_cast<size_t>(j)] += through_gate;
    }
  }
  store_sums(problem.grad_gate_bias, gate_sums);
  store_sums(problem.grad_up_bias, up_sums);
}

uint64_t code_version() {
  return hash_text("pointwise reference 1");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<ForwardProblem>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardReference{.name = "reference",
                                                                     .supports = supports_on_cpu<BackwardProblem>,
                                                                     .run = run_backward,
                                                                     .source_hash = code_version};

}  // namespace kernel_pytorch::pointwise
