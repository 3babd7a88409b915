// torch.ops.kernel_pytorch.linear* and mlp*: one and two linear layers with what stands around them, as products with
// epilogues. A layer's backward is the gradient of its activation and two products; of two layers the first's
// activation is part of the second's product. Weights are [out, in], those of gated layers with rows (gate, up, gate,
// up, ...), of gated_mlp* with all gates before all ups.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using matmul::Form;
using matmul::Kind;

TensorView transposed(TensorView view) {
  std::swap(view.sizes[view.rank - 1], view.sizes[view.rank - 2]);
  std::swap(view.strides[view.rank - 1], view.strides[view.rank - 2]);
  return view;
}

TensorView rows_of_output(Call& call, const MergedRowsView& x, int64_t columns) {
  std::vector<int64_t> sizes(x.given.shape().begin(), x.given.shape().end());
  sizes.back() = columns;
  const TensorView output = call.output(sizes, x.dtype);
  return contiguous_view(output.data, output.dtype, {x.sizes[0], columns}, output.device);
}

// An output that is kept for the backward alone, and its stand-in.
TensorView rows_of_output_if(Call& call, bool wanted, const MergedRowsView& x, int64_t columns) {
  return wanted ? rows_of_output(call, x, columns) : call.output_like_if(false, x, x);
}

TensorView scratch_rows(Call& call, DType dtype, int64_t rows, int64_t columns, Device device) {
  void* data = call.context().scratch->allocate(static_cast<size_t>(rows * columns * size_of(dtype)));
  return contiguous_view(data, dtype, {rows, columns}, device);
}

// [..., columns] with x's leading dimensions: equal numbers of rows are not enough, [1, n] is no [n].
void check_rows(std::string_view op, std::string_view name, const MergedRowsView& view, const MergedRowsView& x,
                int64_t columns) {
  std::vector<int64_t> wanted(x.given.shape().begin(), x.given.shape().end());
  wanted.back() = columns;
  KP_CHECK(std::ranges::equal(view.given.shape(), wanted), op, ": ", name, " has shape ",
           shape_text(view.given.shape()), "; it must be ", shape_text(wanted));
}

// What a layer is: an activation, perhaps of the gates alone.
struct Layer {
  std::string_view op;
  Kind kind;
  bool gated;
  Layer(std::string_view name, const std::string& activation, bool is_gated)
      : op(name), kind(activation::kind_of(activation, name)), gated(is_gated) {}
  bool has_activation() const { return gated || kind != Kind::kIdentity; }
  int64_t columns(int64_t rows_of_weight) const { return gated ? rows_of_weight / 2 : rows_of_weight; }

  void check(const MergedRowsView& x, const TensorView& weight) const {
    KP_CHECK(weight.rank == 2, op, ": weight has shape ", shape_text(weight.shape()), "; it must be [out, in]");
    KP_CHECK(x.given.rank >= 1 && x.given.size(-1) == weight.sizes[1], op, ": x has shape ",
             shape_text(x.given.shape()), ", weight has ", shape_text(weight.shape()),
             "; their last sizes must be equal");
    KP_CHECK(!gated || weight.sizes[0] % 2 == 0, op, ": weight has shape ", shape_text(weight.shape()),
             "; a gated layer's rows are pairs");
  }
  // What a backward is given besides: the gradient of the last output, and what this layer's activation was taken of.
  void check_backward(const MergedRowsView& x, const TensorView& weight, const MergedRowsView& grad_output,
                      int64_t output_columns, const MergedRowsView& preactivation) const {
    check(x, weight);
    check_rows(op, "grad_output", grad_output, x, output_columns);
    if (has_activation()) check_rows(op, "preactivation", preactivation, x, weight.sizes[0]);
  }
  void forward(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& residual,
               const TensorView& output, const TensorView& preactivation, Context& context) const {
    matmul::multiply({.a = x,
                      .b = transposed(weight),
                      .bias = bias,
                      .form = gated ? Form::kGated : Form::kPlain,
                      .activation = kind,
                      .residual = residual,
                      .output = output,
                      .preactivation = preactivation},
                     context);
  }
  // The gradient of what the activation was taken of.
  void activation_backward(const TensorView& grad_output, const TensorView& preactivation, const TensorView& grad_input,
                           Context& context) const {
    if (gated) {
      matmul::pair_gradient(
          {.activation = kind, .grad_output = grad_output, .saved = preactivation, .grad_input = grad_input}, context);
    } else {
      activation::backward({.kind = kind, .grad_output = grad_output, .x = preactivation, .grad_input = grad_input},
                           context);
    }
  }
};

// A column-major weight is a view like another; any other that has no stride of 1 was copied.
TensorView flat(const MatrixView& weight) {
  TensorView matrix = weight;
  if (weight.given.rank != 2) return weight.given;
  matrix.rank = 2;
  matrix.sizes = {weight.sizes[1], weight.sizes[2]};
  matrix.strides = {weight.strides[1], weight.strides[2]};
  return matrix;
}

void linear_any(Call& call, const MergedRowsView& x, const MatrixView& matrix, const TensorView& bias,
                const MergedRowsView& residual, const std::string& activation, bool gated, bool keeps) {
  const Layer layer("linear", activation, gated);
  const TensorView weight = flat(matrix);
  layer.check(x, weight);
  const int64_t columns = layer.columns(weight.sizes[0]);
  if (residual.is_present()) check_rows(layer.op, "residual", residual, x, columns);
  const TensorView output = rows_of_output(call, x, columns);
  const TensorView preactivation =
      keeps ? rows_of_output_if(call, layer.has_activation(), x, weight.sizes[0]) : TensorView{};
  layer.forward(x, weight, bias, residual, output, preactivation, call.context());
}
void linear_infer(Call& call, const MergedRowsView& x, const MatrixView& weight, const ParameterView& bias,
                  const MergedRowsView& residual, const std::string& activation, bool gated) {
  linear_any(call, x, weight, bias, residual, activation, gated, false);
}
void linear_forward(Call& call, const MergedRowsView& x, const MatrixView& weight, const ParameterView& bias,
                    const MergedRowsView& residual, const std::string& activation, bool gated) {
  linear_any(call, x, weight, bias, residual, activation, gated, true);
}

bool is_column_major(const TensorView& weight) {
  return weight.rank == 2 && weight.strides[0] == 1 && weight.strides[1] > 1 && weight.strides[1] >= weight.sizes[0];
}

// Lies in memory as the weight does, so that nobody copies it where it is added to the parameter's.
TensorView weight_gradient(Call& call, bool wanted, const TensorView& weight, const TensorView& x, DType dtype) {
  if (!wanted) return call.output_like_if(false, weight, x);
  TensorView like = contiguous_view(nullptr, dtype, weight.shape());
  if (is_column_major(weight)) like.strides = {1, weight.sizes[0]};
  return call.output(like);
}

// Sums over the rows of a gradient: a product without columns.
void bias_gradient(const TensorView& grad, const TensorView& x, const TensorView& grad_bias, Context& context) {
  TensorView nothing = x;
  nothing.sizes[1] = 0;
  const TensorView output = contiguous_view(grad_bias.data, x.dtype, {grad.sizes[1], 0}, x.device);
  matmul::multiply({.a = transposed(grad), .b = nothing, .output = output, .row_sums = grad_bias}, context);
}

// The two products of a layer's backward, of the gradient of its product. What is not wanted is an absent view; the
// bias' gradient comes with the weight's, except where that is column-major. `vendor`: whose is asked for the weight's.
void products_backward(Call& call, const TensorView& grad, const TensorView& x, const TensorView& weight,
                       const TensorView& grad_x, const TensorView& grad_weight, const TensorView& grad_bias,
                       bool vendor = false) {
  if (grad_x.is_present()) matmul::multiply({.a = grad, .b = weight, .output = grad_x}, call.context());
  const bool is_column = grad_weight.is_present() && is_column_major(grad_weight);
  const auto multiply = vendor ? matmul::multiply_by_vendor : matmul::multiply;
  if (grad_bias.is_present() && (is_column || !grad_weight.is_present())) {
    bias_gradient(grad, x, grad_bias, call.context());
  }
  if (is_column) {
    multiply({.a = transposed(x), .b = grad, .output = transposed(grad_weight)}, call.context());
  } else if (grad_weight.is_present()) {
    multiply({.a = transposed(grad), .b = x, .output = grad_weight, .row_sums = grad_bias}, call.context());
  }
}

void linear_backward(Call& call, const MergedRowsView& grad_output, const MergedRowsView& x, const MatrixView& matrix,
                     const ParameterView& bias, const MergedRowsView& preactivation, const std::string& activation,
                     bool gated, bool input_grad, bool weight_grad, bool bias_grad, std::optional<DType> weight_dtype) {
  const Layer layer("linear backward", activation, gated);
  const TensorView weight = flat(matrix);
  layer.check_backward(x, weight, grad_output, weight.rank == 2 ? layer.columns(weight.sizes[0]) : 0, preactivation);
  const TensorView grad_x = rows_of_output_if(call, input_grad, x, x.sizes[1]);
  const TensorView grad_weight = weight_gradient(call, weight_grad, weight, x, weight_dtype.value_or(weight.dtype));
  const TensorView grad_bias = call.output_like_if(bias_grad, bias, x);
  TensorView grad = grad_output;
  if (layer.has_activation()) {
    grad = scratch_rows(call, x.dtype, x.sizes[0], weight.sizes[0], x.device);
    layer.activation_backward(grad_output, preactivation, grad, call.context());
  }
  products_backward(call, grad, x, weight, grad_x, grad_weight, grad_bias);
}

// What two layers write: the last output, and what is between them, an output too where it is kept.
struct TwoLayers {
  TensorView output, hidden;
};
int64_t checked_hidden_size(const Layer& first, const MergedRowsView& x, const TensorView& weight_in,
                            const TensorView& weight_out) {
  first.check(x, weight_in);
  const int64_t hidden_size = first.columns(weight_in.sizes[0]);
  KP_CHECK(weight_out.rank == 2 && weight_out.sizes[1] == hidden_size, first.op, ": weight_out has shape ",
           shape_text(weight_out.shape()), "; its last size must be the hidden size ", hidden_size);
  return hidden_size;
}
TwoLayers two_layers(Call& call, const Layer& first, const MergedRowsView& x, const TensorView& weight_in,
                     const TensorView& weight_out, const MergedRowsView& residual, bool keeps) {
  const int64_t hidden_size = checked_hidden_size(first, x, weight_in, weight_out);
  if (residual.is_present()) check_rows(first.op, "residual", residual, x, weight_out.sizes[0]);
  const TensorView output = rows_of_output(call, x, weight_out.sizes[0]);
  return {output, keeps ? rows_of_output(call, x, hidden_size)
                        : scratch_rows(call, x.dtype, x.sizes[0], hidden_size, x.device)};
}

void check_two_layers_backward(const Layer& first, const MergedRowsView& grad_output, const MergedRowsView& x,
                               const TensorView& weight_in, const TensorView& weight_out, const MergedRowsView& hidden,
                               const MergedRowsView& preactivation) {
  const int64_t hidden_size = checked_hidden_size(first, x, weight_in, weight_out);
  first.check_backward(x, weight_in, grad_output, weight_out.sizes[0], preactivation);
  check_rows(first.op, "hidden", hidden, x, hidden_size);
}

void mlp_any(Call& call, const MergedRowsView& x, const MatrixView& matrix_in, const TensorView& bias_in,
             const MatrixView& matrix_out, const TensorView& bias_out, const MergedRowsView& residual,
             const std::string& activation, bool gated, bool keeps) {
  const Layer first("mlp", activation, gated), second("mlp", "identity", false);
  const TensorView weight_in = flat(matrix_in), weight_out = flat(matrix_out);
  const auto [output, hidden] = two_layers(call, first, x, weight_in, weight_out, residual, keeps);
  const TensorView preactivation =
      keeps ? rows_of_output_if(call, first.has_activation(), x, weight_in.sizes[0]) : TensorView{};
  first.forward(x, weight_in, bias_in, {}, hidden, preactivation, call.context());
  second.forward(hidden, weight_out, bias_out, residual, output, {}, call.context());
}
void mlp_infer(Call& call, const MergedRowsView& x, const MatrixView& weight_in, const ParameterView& bias_in,
               const MatrixView& weight_out, const ParameterView& bias_out, const MergedRowsView& residual,
               const std::string& activation, bool gated) {
  mlp_any(call, x, weight_in, bias_in, weight_out, bias_out, residual, activation, gated, false);
}
void mlp_forward(Call& call, const MergedRowsView& x, const MatrixView& weight_in, const ParameterView& bias_in,
                 const MatrixView& weight_out, const ParameterView& bias_out, const MergedRowsView& residual,
                 const std::string& activation, bool gated) {
  mlp_any(call, x, weight_in, bias_in, weight_out, bias_out, residual, activation, gated, true);
}

void mlp_backward(Call& call, const MergedRowsView& grad_output, const MergedRowsView& x, const MatrixView& matrix_in,
                  const ParameterView& bias_in, const MatrixView& matrix_out, const ParameterView& bias_out,
                  const MergedRowsView& hidden, const MergedRowsView& preactivation, const std::string& activation,
                  bool gated, bool input_grad, bool weight_in_grad, bool bias_in_grad, bool weight_out_grad,
                  bool bias_out_grad) {
  const Layer first("mlp backward", activation, gated);
  const TensorView weight_in = flat(matrix_in), weight_out = flat(matrix_out);
  check_two_layers_backward(first, grad_output, x, weight_in, weight_out, hidden, preactivation);
  const TensorView grad_x = rows_of_output_if(call, input_grad, x, x.sizes[1]);
  const TensorView grad_weight_in = weight_gradient(call, weight_in_grad, weight_in, x, weight_in.dtype);
  const TensorView grad_bias_in = call.output_like_if(bias_in_grad, bias_in, x);
  const TensorView grad_weight_out = weight_gradient(call, weight_out_grad, weight_out, x, weight_out.dtype);
  const TensorView grad_bias_out = call.output_like_if(bias_out_grad, bias_out, x);
  products_backward(call, grad_output, hidden, weight_out, {}, grad_weight_out, grad_bias_out);
  if (!input_grad && !weight_in_grad && !bias_in_grad) return;
  const TensorView grad = scratch_rows(call, x.dtype, x.sizes[0], weight_in.sizes[0], x.device);
  const bool has_activation = first.has_activation();
  matmul::multiply({.a = grad_output,
                    .b = weight_out,
                    .form = !has_activation ? Form::kPlain
                            : gated         ? Form::kGatedGradient
                                            : Form::kGradient,
                    .activation = first.kind,
                    .saved = has_activation ? static_cast<const TensorView&>(preactivation) : TensorView{},
                    .output = grad},
                   call.context());
  products_backward(call, grad, x, weight_in, grad_x, grad_weight_in, grad_bias_in);
}

// Two layers of which the first has all gates before all ups: the forms of halves, so that gate and up may be two
// parameters one after the other in memory, and their gradients too. `vendor` is for the weights' gradients.
void gated_mlp_any(Call& call, const MergedRowsView& x, const MatrixView& matrix_in, const MatrixView& matrix_out,
                   const MergedRowsView& residual, const std::string& activation, bool keeps) {
  const Layer first("gated_mlp", activation, true), second("gated_mlp", "identity", false);
  const TensorView weight_in = flat(matrix_in), weight_out = flat(matrix_out);
  const auto [output, hidden] = two_layers(call, first, x, weight_in, weight_out, residual, keeps);
  const TensorView preactivation = keeps ? rows_of_output(call, x, weight_in.sizes[0]) : TensorView{};
  matmul::multiply({.a = x,
                    .b = transposed(weight_in),
                    .form = Form::kGatedHalves,
                    .activation = first.kind,
                    .output = hidden,
                    .preactivation = preactivation},
                   call.context());
  second.forward(hidden, weight_out, {}, residual, output, {}, call.context());
}
void gated_mlp_infer(Call& call, const MergedRowsView& x, const MatrixView& weight_in, const MatrixView& weight_out,
                     const MergedRowsView& residual, const std::string& activation, bool) {
  gated_mlp_any(call, x, weight_in, weight_out, residual, activation, false);
}
void gated_mlp_forward(Call& call, const MergedRowsView& x, const MatrixView& weight_in, const MatrixView& weight_out,
                       const MergedRowsView& residual, const std::string& activation, bool) {
  gated_mlp_any(call, x, weight_in, weight_out, residual, activation, true);
}

void gated_mlp_backward(Call& call, const MergedRowsView& grad_output, const MergedRowsView& x,
                        const MatrixView& matrix_in, const MatrixView& matrix_out, const MergedRowsView& hidden,
                        const MergedRowsView& preactivation, const std::string& activation, bool vendor,
                        bool input_grad, bool weight_in_grad, bool weight_out_grad) {
  const Layer first("gated_mlp backward", activation, true);
  const TensorView weight_in = flat(matrix_in), weight_out = flat(matrix_out);
  check_two_layers_backward(first, grad_output, x, weight_in, weight_out, hidden, preactivation);
  const TensorView grad_x = rows_of_output_if(call, input_grad, x, x.sizes[1]);
  const TensorView grad_weight_in = call.output_like_if(weight_in_grad, weight_in, x);
  const TensorView grad_weight_out = call.output_like_if(weight_out_grad, weight_out, x);
  products_backward(call, grad_output, hidden, weight_out, {}, grad_weight_out, {}, vendor);
  if (!input_grad && !weight_in_grad) return;
  const TensorView grad = scratch_rows(call, x.dtype, x.sizes[0], weight_in.sizes[0], x.device);
  matmul::multiply({.a = grad_output,
                    .b = weight_out,
                    .form = Form::kGatedHalvesGradient,
                    .activation = first.kind,
                    .saved = preactivation,
                    .output = grad},
                   call.context());
  products_backward(call, grad, x, weight_in, grad_x, grad_weight_in, {}, vendor);
}

using Ops =
    OpList<Op<"linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool gated) -> Tensor",
              linear_infer>,
           Op<"linear_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool gated) "
              "-> (Tensor output, Tensor preactivation)",
              linear_forward>,
           Op<"linear_backward(Tensor grad_output, Tensor x, Tensor weight, Tensor? bias, Tensor preactivation, "
              "str activation, bool gated, bool input_grad, bool weight_grad, bool bias_grad, "
              "ScalarType? weight_dtype=None) "
              "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
              linear_backward>,
           Op<"mlp(Tensor x, Tensor weight_in, Tensor? bias_in, Tensor weight_out, Tensor? bias_out, Tensor? residual, "
              "str activation, bool gated) -> Tensor",
              mlp_infer>,
           Op<"mlp_forward(Tensor x, Tensor weight_in, Tensor? bias_in, Tensor weight_out, Tensor? bias_out, "
              "Tensor? residual, str activation, bool gated) -> (Tensor output, Tensor hidden, Tensor preactivation)",
              mlp_forward>,
           Op<"mlp_backward(Tensor grad_output, Tensor x, Tensor weight_in, Tensor? bias_in, Tensor weight_out, "
              "Tensor? bias_out, Tensor hidden, Tensor preactivation, str activation, bool gated, bool input_grad, "
              "bool weight_in_grad, bool bias_in_grad, bool weight_out_grad, bool bias_out_grad) -> (Tensor grad_x, "
              "Tensor grad_weight_in, Tensor grad_bias_in, Tensor grad_weight_out, Tensor grad_bias_out)",
              mlp_backward>,
           Op<"gated_mlp(Tensor x, Tensor weight_in, Tensor weight_out, Tensor? residual, str activation, bool vendor) "
              "-> Tensor",
              gated_mlp_infer>,
           Op<"gated_mlp_forward(Tensor x, Tensor weight_in, Tensor weight_out, Tensor? residual, str activation, "
              "bool vendor) -> (Tensor output, Tensor hidden, Tensor preactivation)",
              gated_mlp_forward>,
           Op<"gated_mlp_backward(Tensor grad_output, Tensor x, Tensor weight_in, Tensor weight_out, Tensor hidden, "
              "Tensor preactivation, str activation, bool vendor, bool input_grad, bool weight_in_grad, "
              "bool weight_out_grad) -> (Tensor grad_x, Tensor grad_weight_in, Tensor grad_weight_out)",
              gated_mlp_backward>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
