// The two compositions: which grouped products, in which order, with what between them.
#include "kernel_pytorch/ops/moe_mlp/moe_mlp.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::moe_mlp {
namespace {

using grouped_matmul::Product;
using grouped_matmul::Sums;
using grouped_matmul::WeightGradient;

TensorView transposed_if(bool is_transposed, TensorView view) {
  if (!is_transposed || !view.is_present()) return view;
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

// Memory for rows between two parts: the scratch of a call, or none where parts are only described.
struct Rows {
  Context* context;
  Device device;

  TensorView operator()(DType dtype, std::initializer_list<int64_t> sizes) const {
    TensorView view = contiguous_view(nullptr, dtype, sizes, device);
    if (context != nullptr) {
      view.data = context->scratch->allocate(static_cast<size_t>(std::max<int64_t>(view.byte_count(), 1)));
    }
    return view;
  }
};

// Where products of rows by so many columns in all read the same gathered rows, the rows are copied first: a GPU's
// products of rows as they lie are some 3 % faster, which is a copy's time at 8000 columns
// (ops/grouped_matmul/NOTES.md).
constexpr int64_t kColumnsOfACopy = 12288;
bool copies_rows(const TensorView& rows, int64_t columns) {
  return rows.device.kind == DeviceKind::kCuda && columns >= kColumnsOfACopy;
}
// Rows in the order of experts: a sum of one row each, zeros where there is none.
Combine copy_of(const TensorView& rows, const TensorView& token_of_row, const Rows& memory) {
  const int64_t count = token_of_row.sizes[0];
  return {.y = rows,
          .row_of_token = contiguous_view(token_of_row.data, DType::kInt32, {count, 1}, token_of_row.device),
          .output = memory(rows.dtype, {count, rows.sizes[1]})};
}

struct ForwardParts {
  Combine copy;  // absent where the first product gathers
  Product up, down;
  Combine combine;

  ForwardParts(const Forward& problem, const Rows& rows) {
    const TensorView gate_up = transposed_if(problem.transposed, problem.gate_up);
    const TensorView of_down = transposed_if(problem.transposed, problem.down);
    const int64_t count = problem.token_of_row.sizes[0];
    const DType dtype = problem.x.dtype;
    const bool copies = copies_rows(problem.x, gate_up.sizes[2]);
    if (copies) copy = copy_of(problem.x, problem.token_of_row, rows);
    up = {.a = copies ? copy.output : problem.x,
          .b = gate_up,
          .offsets = problem.offsets,
          .gather = copies ? TensorView{} : problem.token_of_row,
          .bias = problem.gate_up_bias,
          .form = problem.form,
          .activation = problem.activation,
          .limit = problem.limit,
          .slope = problem.slope,
          .output = rows(dtype, {count, of_down.sizes[1]}),
          .preactivation = problem.preactivation};
    down = {.a = up.output,
            .b = of_down,
            .offsets = problem.offsets,
            .bias = problem.down_bias,
            .output = rows(dtype, {count, problem.x.sizes[1]})};
    combine = {
        .y = down.output, .row_of_token = problem.row_of_token, .weights = problem.weights, .output = problem.output};
  }

  // Calls visit(part) for each part, in order.
  template <class Visit>
  void visit(const Visit& visit) const {
    if (copy.output.is_present()) visit(copy);
    visit(up);
    visit(down);
    visit(combine);
  }
};

struct BackwardParts {
  Combine copy_of_grad, copy_of_x;  // absent where products gather
  Product to_hidden, to_rows;
  ActivationBackward activation;
  WeightGradient gate_up, down;
  Sums gate_up_bias, down_bias;
  Combine to_x;
  bool through_up, through_activation;

  BackwardParts(const Backward& problem, const Rows& rows) {
    const DType dtype = problem.x.dtype;
    const int64_t count = problem.token_of_row.sizes[0], in = problem.x.sizes[1];
    const int64_t inner = problem.down.sizes[problem.transposed ? 2 : 1];
    through_up =
        problem.grad_x.is_present() || problem.grad_gate_up.is_present() || problem.grad_gate_up_bias.is_present();
    through_activation = through_up || problem.grad_down.is_present() || problem.grad_weights.is_present() ||
                         problem.grad_down_bias.is_present();
    if (!through_activation) return;
    const bool is_gated = problem.form != Form::kPlain;
    const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
    const bool copies_grad = copies_rows(problem.grad_output, problem.grad_down.is_present() ? 2 * inner : inner);
    if (copies_grad) copy_of_grad = copy_of(problem.grad_output, problem.token_of_row, rows);
    const TensorView grad = copies_grad ? copy_of_grad.output : problem.grad_output;
    const TensorView of_grad = copies_grad ? TensorView{} : problem.token_of_row;
    to_hidden = {.a = grad,
                 .b = transposed_if(!problem.transposed, problem.down),
                 .offsets = problem.offsets,
                 .gather = of_grad,
                 .output = rows(dtype, {count, inner})};
    activation = {.grad_hidden = to_hidden.output,
                  .preactivation = problem.preactivation,
                  .row_of_token = problem.row_of_token,
                  .weights = problem.weights,
                  .form = problem.form,
                  .activation = problem.activation,
                  .limit = problem.limit,
                  .slope = problem.slope,
                  .grad_preactivation = rows(dtype, {count, is_gated ? 2 * inner : inner}),
                  .hidden = rows(dtype, {count, inner})};
    activation.grad_weights =
        problem.grad_weights.is_present() ? problem.grad_weights : rows(statistic_type(dtype), {tokens, k});
    if (problem.down_bias.is_present() && problem.grad_weights.is_present()) {
      activation.grad_output = problem.grad_output;
      activation.down_bias = problem.down_bias;
      activation.experts = problem.experts;
    }
    if (problem.grad_down_bias.is_present()) activation.row_weights = rows(statistic_type(dtype), {count});
    down = {.a = activation.hidden,
            .b = grad,
            .offsets = problem.offsets,
            .gather_b = of_grad,
            .output = transposed_if(problem.transposed, problem.grad_down)};
    down_bias = {.x = problem.grad_output,
                 .offsets = problem.offsets,
                 .gather = problem.token_of_row,
                 .factors = activation.row_weights,
                 .output = problem.grad_down_bias};
    const bool copies_x =
        problem.grad_gate_up.is_present() && copies_rows(problem.x, activation.grad_preactivation.sizes[1]);
    if (copies_x) copy_of_x = copy_of(problem.x, problem.token_of_row, rows);
    gate_up = {.a = copies_x ? copy_of_x.output : problem.x,
               .b = activation.grad_preactivation,
               .offsets = problem.offsets,
               .gather_a = copies_x ? TensorView{} : problem.token_of_row,
               .output = transposed_if(problem.transposed, problem.grad_gate_up)};
    gate_up_bias = {
        .x = activation.grad_preactivation, .offsets = problem.offsets, .output = problem.grad_gate_up_bias};
    if (!problem.grad_x.is_present()) return;
    to_rows = {.a = activation.grad_preactivation,
               .b = transposed_if(!problem.transposed, problem.gate_up),
               .offsets = problem.offsets,
               .output = rows(dtype, {count, in})};
    to_x = {.y = to_rows.output, .row_of_token = problem.row_of_token, .output = problem.grad_x};
  }

  // Calls visit(part) for each part that is wanted, in order.
  template <class Visit>
  void visit(const Visit& visit) const {
    if (!through_activation) return;
    if (copy_of_grad.output.is_present()) visit(copy_of_grad);
    visit(to_hidden);
    visit(activation);
    if (down.output.is_present()) visit(down);
    if (down_bias.output.is_present()) visit(down_bias);
    if (copy_of_x.output.is_present()) visit(copy_of_x);
    if (gate_up.output.is_present()) visit(gate_up);
    if (gate_up_bias.output.is_present()) visit(gate_up_bias);
    if (to_x.output.is_present()) {
      visit(to_rows);
      visit(to_x);
    }
  }
};

void run(const Product& part, Context& context) {
  grouped_matmul::multiply(part, context);
}
void run(const WeightGradient& part, Context& context) {
  grouped_matmul::weight_gradient(part, context);
}
void run(const Sums& part, Context& context) {
  grouped_matmul::sum(part, context);
}
void run(const Combine& part, Context& context) {
  combine(part, context);
}
void run(const ActivationBackward& part, Context& context) {
  activation_backward(part, context);
}

template <class Problem>
std::unique_ptr<registry::AnyProblem> owned(const registry::Operation<Problem>& operation, Problem problem,
                                            const DeviceInfo& device) {
  check(problem, device.device);
  return std::make_unique<registry::OwnedProblem<Problem>>(operation, problem, device);
}
std::unique_ptr<registry::AnyProblem> part_of(const Combine& part, const DeviceInfo& device) {
  return owned(kCombine, part, device);
}
std::unique_ptr<registry::AnyProblem> part_of(const ActivationBackward& part, const DeviceInfo& device) {
  return owned(kActivationBackward, part, device);
}
template <class Part>
std::unique_ptr<registry::AnyProblem> part_of(const Part& part, const DeviceInfo& device) {
  return grouped_matmul::problem_of(part, device);
}

// Rows that the host may read: of the tensor, or -1.
void check_values(std::string_view op, std::string_view name, const TensorView& values, int64_t count,
                  const Context& context) {
  if (!values.is_present() || Rehearsal::is_running() || context.device().kind != DeviceKind::kCpu) return;
  for (int64_t i = 0; i < values.element_count(); ++i) {
    const int32_t value = values.as<const int32_t>()[i];
    KP_CHECK(value >= -1 && value < count, op, ": ", name, " has the value ", value, "; it must be below ", count,
             ", or -1 for none");
  }
}
void check_values(const Combine& problem, const Context& context) {
  check_values("moe_combine", "row_of_token", problem.row_of_token, problem.y.sizes[0], context);
}
void check_values(const CombineBackward& problem, const Context& context) {
  check_values("moe_combine backward", "row_of_token", problem.row_of_token, problem.y.sizes[0], context);
}
void check_values(const ActivationBackward& problem, const Context& context) {
  constexpr std::string_view kOp = "moe_activation_backward";
  check_values(kOp, "row_of_token", problem.row_of_token, problem.grad_hidden.sizes[0], context);
  if (problem.down_bias.is_present()) {
    check_values(kOp, "experts", problem.experts, problem.down_bias.sizes[0], context);
  }
}

template <class Problem>
void check_and_run(const registry::Operation<Problem>& operation, const Problem& arguments, Context& context) {
  Problem problem = arguments;
  check(problem, context.device());
  check_values(problem, context);
  registry::run_best(operation, problem, context);
}

}  // namespace

void compose(const Forward& problem, Context& context) {
  const ScratchScope scope(context.scratch);
  const ForwardParts parts(problem, {&context, context.device()});
  parts.visit([&](const auto& part) { run(part, context); });
}

void compose(const Backward& problem, Context& context) {
  const ScratchScope scope(context.scratch);
  const BackwardParts parts(problem, {&context, context.device()});
  parts.visit([&](const auto& part) { run(part, context); });
}

registry::Parts parts_of(const Forward& problem, const DeviceInfo& device) {
  const ForwardParts all(problem, {nullptr, device.device});
  registry::Parts parts;
  all.visit([&](const auto& part) { parts.push_back(part_of(part, device)); });
  return parts;
}

registry::Parts parts_of(const Backward& problem, const DeviceInfo& device) {
  const BackwardParts all(problem, {nullptr, device.device});
  registry::Parts parts;
  all.visit([&](const auto& part) { parts.push_back(part_of(part, device)); });
  return parts;
}

void combine(const Combine& arguments, Context& context) {
  check_and_run(kCombine, arguments, context);
}
void combine_backward(const CombineBackward& arguments, Context& context) {
  check_and_run(kCombineBackward, arguments, context);
}
void activation_backward(const ActivationBackward& arguments, Context& context) {
  check_and_run(kActivationBackward, arguments, context);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  compose(problem, context);
}
void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  compose(problem, context);
}

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Combine, combine>("moe_combine", "moe_combine_forward", kCombineFields),
                   registry::plain<CombineBackward, combine_backward>("moe_combine_backward", kCombineBackwardFields),
                   registry::differentiable<Forward, forward>("moe_mlp", "moe_mlp_forward", kForwardFields),
                   registry::plain<Backward, backward>("moe_mlp_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{
    .declarations = kDeclarations,
    .operations = registry::erased<kCombine, kCombineBackward, kActivationBackward, kForward, kBackward>};

}  // namespace kernel_pytorch::moe_mlp
