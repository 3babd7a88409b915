// The references of the combination and of the activation's gradient: scalar, in double.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::moe_mlp {
namespace {

double at(const TensorView& view, int64_t row, int64_t column) {
  return load_element(view.data, view.dtype, row * view.strides[0] + column);
}
void put(const TensorView& view, int64_t row, int64_t column, double value) {
  store_element(view.data, view.dtype, row * view.strides[0] + column, value);
}
double weight_of(const TensorView& weights, int64_t pair) {
  return weights.is_present() ? load_element(weights.data, weights.dtype, pair) : 1;
}

void run_combine(const Combine& problem, int, Context&) {
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t column = 0; column < problem.y.sizes[1]; ++column) {
      double sum = 0;
      for (int64_t pair = token * k; pair < (token + 1) * k; ++pair) {
        const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
        if (row >= 0) sum += weight_of(problem.weights, pair) * at(problem.y, row, column);
      }
      put(problem.output, token, column, sum);
    }
  }
}

void run_combine_backward(const CombineBackward& problem, int, Context&) {
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
  const int64_t columns = problem.y.sizes[1];
  for (int64_t i = 0; problem.grad_y.is_present() && i < problem.grad_y.element_count(); ++i) {
    store_element(problem.grad_y.data, problem.grad_y.dtype, i, 0);
  }
  for (int64_t pair = 0; pair < tokens * k; ++pair) {
    const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
    double product = 0;
    for (int64_t column = 0; row >= 0 && column < columns; ++column) {
      const double gradient = at(problem.grad_output, pair / k, column);
      product += gradient * at(problem.y, row, column);
      if (problem.grad_y.is_present()) put(problem.grad_y, row, column, gradient * weight_of(problem.weights, pair));
    }
    if (problem.grad_weights.is_present()) {
      store_element(problem.grad_weights.data, problem.grad_weights.dtype, pair, product);
    }
  }
}

// A gate's value and the derivatives of its product with what it gates.
struct Gate {
  double value, of_gate, of_up;
};
Gate gate_of(const ActivationBackward& problem, double gate, double up) {
  if (problem.limit == 0) {
    const pointwise::Values values = pointwise::evaluate(problem.activation, gate);
    return {values.value * up, values.derivative * up, values.value};
  }
  const double limit = problem.limit, slope = problem.slope;
  const double g = std::min(gate, limit), factor = std::clamp(up, -limit, limit) + 1;
  const double s = 1 / (1 + std::exp(-slope * g));
  return {g * s * factor, gate <= limit ? (s + slope * g * s * (1 - s)) * factor : 0,
          std::abs(up) <= limit ? g * s : 0};
}

void run_activation(const ActivationBackward& problem, int, Context&) {
  const int64_t pairs = problem.row_of_token.element_count(), k = problem.row_of_token.sizes[1];
  const int64_t inner = problem.grad_hidden.sizes[1];
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
    double product = 0;
    if (row >= 0) {
      const double weight = weight_of(problem.weights, pair);
      for (int64_t j = 0; j < inner; ++j) {
        const double gradient = at(problem.grad_hidden, row, j);
        double value = 0;
        if (problem.form == Form::kPlain) {
          const pointwise::Values values = pointwise::evaluate(problem.activation, at(problem.preactivation, row, j));
          value = values.value;
          put(problem.grad_preactivation, row, j, weight * gradient * values.derivative);
        } else {
          const bool is_packed = problem.form == Form::kPackedGated;
          const int64_t of_gate = is_packed ? j : 2 * j, of_up = is_packed ? inner + j : 2 * j + 1;
          const Gate gate =
              gate_of(problem, at(problem.preactivation, row, of_gate), at(problem.preactivation, row, of_up));
          value = gate.value;
          put(problem.grad_preactivation, row, of_gate, weight * gradient * gate.of_gate);
          put(problem.grad_preactivation, row, of_up, weight * gradient * gate.of_up);
        }
        product += gradient * value;
        put(problem.hidden, row, j, weight * value);
      }
      if (problem.down_bias.is_present()) {
        const int32_t expert = problem.experts.as<const int32_t>()[pair];
        for (int64_t j = 0; j < problem.down_bias.sizes[1]; ++j) {
          product += at(problem.grad_output, pair / k, j) * at(problem.down_bias, expert, j);
        }
      }
      if (problem.row_weights.is_present()) {
        store_element(problem.row_weights.data, problem.row_weights.dtype, row, weight);
      }
    }
    store_element(problem.grad_weights.data, problem.grad_weights.dtype, pair, product);
  }
}

uint64_t code_version() {
  return hash_text("moe_mlp reference 1");
}

}  // namespace

constinit const registry::Kernel<Combine> kCombineReference{
    .name = "reference", .supports = supports_on_cpu<Combine>, .run = run_combine, .source_hash = code_version};
constinit const registry::Kernel<CombineBackward> kCombineBackwardReference{
    .name = "reference",
    .supports = supports_on_cpu<CombineBackward>,
    .run = run_combine_backward,
    .source_hash = code_version};
constinit const registry::Kernel<ActivationBackward> kActivationBackwardReference{
    .name = "reference",
    .supports = supports_on_cpu<ActivationBackward>,
    .run = run_activation,
    .source_hash = code_version};

}  // namespace kernel_pytorch::moe_mlp
