// The two ways to compute a linear layer: of GEMMs by whatever kernels they choose, and the same of references. What
// the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/linear/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::linear {
namespace {

using registry::ProblemRequest;

void describe_layer(const TensorView& x, const TensorView& weight, const TensorView& bias, Activation activation,
                    bool gated, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(x.sizes[0]));
  key.field("out", weight.sizes[0]);
  key.field("in", weight.sizes[1]);
  key.field("dtype", x.dtype);
  key.field("bias", bias);
  key.field("activation", static_cast<int64_t>(activation));
  key.field("gated", gated);
  key.field("column_major", is_column_major(weight));
}

void describe_forward(const Forward& problem, tuning::KeyBuilder& key) {
  describe_layer(problem.x, problem.weight, problem.bias, problem.activation, problem.gated, key);
  key.field("residual", problem.residual);
  key.field("preactivation", problem.preactivation);
}
void describe_backward(const Backward& problem, tuning::KeyBuilder& key) {
  describe_layer(problem.x, problem.weight, problem.bias, problem.activation, problem.gated, key);
  key.field("grad_x", problem.grad_x);
  key.field("grad_weight", problem.grad_weight);
  key.field("grad_bias", problem.grad_bias);
}

// What both directions ask for. The shape is [rows, out, in].
struct Wanted {
  int64_t rows, out, in;
  Activation activation;
  bool gated, column_major, bias;
  DType bias_dtype, weight_dtype;

  Wanted(const ProblemRequest& request, std::string_view op) {
    KP_CHECK(request.shape.size() == 3, op, ": the shape is ", shape_text(request.shape),
             "; it must be [rows, out, in]");
    rows = request.shape[0], out = request.shape[1], in = request.shape[2];
    activation = static_cast<Activation>(
        registry::choice_option(request, "activation", registry::words_of(kActivationNames), "identity"));
    gated = registry::flag_option(request, "gated", false);
    column_major = registry::flag_option(request, "column_major", false);
    bias = registry::flag_option(request, "bias", true);
    bias_dtype = registry::dtype_option(request, "bias_dtype", request.dtype);
    weight_dtype = registry::dtype_option(request, "weight_dtype", request.dtype);
  }
  int64_t columns() const { return gated ? out / 2 : out; }
  TensorView matrix(DType dtype, Device device) const {
    TensorView view = contiguous_view(nullptr, dtype, {out, in}, device);
    if (column_major) view.strides[0] = 1, view.strides[1] = out;
    return view;
  }
};

// Options: activation=WORD, gated, bias, residual, preactivation, column_major=0|1, bias_dtype=DTYPE.
Forward make_forward(const ProblemRequest& request) {
  registry::check_options(request,
                          {"activation", "gated", "bias", "bias_dtype", "residual", "preactivation", "column_major"});
  const Wanted wanted(request, "linear_forward");
  const auto rows = [&](int64_t columns) {
    return contiguous_view(nullptr, request.dtype, {wanted.rows, columns}, request.device);
  };
  Forward problem{.x = rows(wanted.in),
                  .weight = wanted.matrix(request.dtype, request.device),
                  .activation = wanted.activation,
                  .gated = wanted.gated,
                  .output = rows(wanted.columns())};
  if (wanted.bias) problem.bias = contiguous_view(nullptr, wanted.bias_dtype, {wanted.out}, request.device);
  if (registry::flag_option(request, "residual", false)) problem.residual = rows(wanted.columns());
  if (registry::flag_option(request, "preactivation", false)) problem.preactivation = rows(wanted.out);
  check(problem, request.device);
  return problem;
}

// Options: activation=WORD, gated, bias, column_major, input_grad, weight_grad=0|1, bias_dtype, weight_dtype=DTYPE.
Backward make_backward(const ProblemRequest& request) {
  registry::check_options(request, {"activation", "gated", "bias", "bias_dtype", "weight_dtype", "column_major",
                                    "input_grad", "weight_grad"});
  const Wanted wanted(request, "linear_backward");
  const auto rows = [&](int64_t columns) {
    return contiguous_view(nullptr, request.dtype, {wanted.rows, columns}, request.device);
  };
  Backward problem{.grad_output = rows(wanted.columns()),
                   .x = rows(wanted.in),
                   .weight = wanted.matrix(request.dtype, request.device),
                   .activation = wanted.activation,
                   .gated = wanted.gated};
  if (has_activation(wanted.activation, wanted.gated)) problem.preactivation = rows(wanted.out);
  if (registry::flag_option(request, "input_grad", true)) problem.grad_x = rows(wanted.in);
  if (registry::flag_option(request, "weight_grad", true)) {
    problem.grad_weight = wanted.matrix(wanted.weight_dtype, request.device);
  }
  if (wanted.bias) {
    problem.bias = contiguous_view(nullptr, wanted.bias_dtype, {wanted.out}, request.device);
    problem.grad_bias = problem.bias;
  }
  check(problem, request.device);
  return problem;
}

// Fewer rows.
template <class Problem>
int64_t fewer_rows(const Problem& problem, int64_t elements) {
  const int64_t widest = std::max({problem.weight.sizes[0], problem.weight.sizes[1], int64_t{1}});
  return std::clamp<int64_t>(elements / widest, 1, std::max<int64_t>(problem.x.sizes[0], 1));
}
Forward shrink_forward(const Forward& problem, int64_t elements) {
  Forward small = problem;
  const int64_t rows = fewer_rows(problem, elements);
  for (TensorView* view : {&small.x, &small.residual, &small.output, &small.preactivation}) view->sizes[0] = rows;
  return small;
}
Backward shrink_backward(const Backward& problem, int64_t elements) {
  Backward small = problem;
  const int64_t rows = fewer_rows(problem, elements);
  for (TensorView* view : {&small.grad_output, &small.x, &small.preactivation, &small.grad_x}) view->sizes[0] = rows;
  return small;
}

registry::Cost cost_of_forward(const Forward& problem) {
  return {.bytes = registry::bytes_of_fields(kForwardFields, &problem),
          .flops = 2 * problem.x.sizes[0] * problem.weight.element_count()};
}
registry::Cost cost_of_backward(const Backward& problem) {
  const int64_t gemms = problem.grad_x.is_present() + problem.grad_weight.is_present();
  return {.bytes = registry::bytes_of_fields(kBackwardFields, &problem),
          .flops = 2 * problem.x.sizes[0] * problem.weight.element_count() * gemms};
}

std::vector<ProblemRequest> forward_shapes() {
  std::vector<ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype,
                       std::vector<std::pair<std::string, std::string>> options = {}) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({67, 130, 40}, dtype);
    add({1, 72, 96}, dtype, {{"bias", "0"}, {"column_major", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "gelu"}, {"residual", "1"}, {"preactivation", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "silu"}, {"gated", "1"}, {"residual", "1"}, {"preactivation", "1"}});
    add({5, 24, 16}, dtype, {{"bias_dtype", "fp32"}});
    add({0, 8, 8}, dtype);
  }
  add({7, 10, 6}, DType::kFloat64, {{"activation", "tanh"}, {"preactivation", "1"}});
  return requests;
}

std::vector<ProblemRequest> backward_shapes() {
  std::vector<ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype,
                       std::vector<std::pair<std::string, std::string>> options = {}) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({67, 130, 40}, dtype);
    add({31, 72, 96}, dtype, {{"column_major", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "gelu"}});
    add({33, 64, 48}, dtype, {{"activation", "silu"}, {"gated", "1"}});
    add({40, 24, 16}, dtype, {{"bias_dtype", "fp32"}, {"weight_dtype", "fp32"}, {"input_grad", "0"}});
    add({40, 24, 16}, dtype, {{"weight_grad", "0"}});
    add({0, 8, 8}, dtype);
  }
  add({7, 10, 6}, DType::kFloat64, {{"activation", "tanh"}});
  return requests;
}

}  // namespace

registry::Parts parts_of(const Forward& arguments, const DeviceInfo& device) {
  Forward problem = arguments;
  check(problem, device.device);
  registry::Parts parts;
  parts.push_back(matmul::problem_of(product_of(problem), device));
  return parts;
}

registry::Parts parts_of(const Backward& arguments, const DeviceInfo& device) {
  Backward problem = arguments;
  check(problem, device.device);
  registry::Parts parts;
  const bool is_activated = has_activation(problem.activation, problem.gated);
  const TensorView& grad = is_activated ? problem.preactivation : problem.grad_output;
  if (problem.gated) {
    parts.push_back(matmul::problem_of({.activation = kind_of(problem.activation),
                                        .grad_output = problem.grad_output,
                                        .saved = problem.preactivation,
                                        .grad_input = grad},
                                       device));
  }
  visit_products(problem, grad,
                 [&](const matmul::Product& product) { parts.push_back(matmul::problem_of(product, device)); });
  return parts;
}

constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields>({.name = "linear_forward",
                                                 .kernels = composed_kernels<Forward, compose>,
                                                 .describe = describe_forward,
                                                 .make = make_forward,
                                                 .shrink = shrink_forward,
                                                 .cost = cost_of_forward,
                                                 .shapes = forward_shapes,
                                                 .parts = parts_of});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields>({.name = "linear_backward",
                                                   .kernels = composed_kernels<Backward, compose>,
                                                   .describe = describe_backward,
                                                   .make = make_backward,
                                                   .shrink = shrink_backward,
                                                   .cost = cost_of_backward,
                                                   .shapes = backward_shapes,
                                                   .parts = parts_of});

}  // namespace kernel_pytorch::linear
