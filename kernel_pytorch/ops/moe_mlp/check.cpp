// What the mixture's MLPs ask of their arguments; the products inside check the rest.
#include <algorithm>
#include <initializer_list>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"

namespace kernel_pytorch::moe_mlp {
namespace {

constexpr int64_t kMostChosen = 16;  // as in ops/moe_routing

struct MixtureCheck {
  std::string_view op;
  std::string_view leader_name;
  const TensorView& leader;  // whose type the others have
  Device device;

  void check_leader(int rank) const {
    check_tensor(leader_name, leader, rank);
    const DType dtype = leader.dtype;
    const bool is_known = dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
                          (dtype == DType::kFloat64 && device.kind == DeviceKind::kCpu);
    KP_CHECK(is_known, op, ": ", leader_name, " is ", dtype, "; convert it to fp32, bf16, fp16, or on the CPU fp64");
    check_dense(leader_name, leader);
  }
  void check_tensor(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.rank == rank, op, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ", rank,
             " dimensions");
  }
  void check_dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, op, ": ", name,
             " has a last stride of ", view.stride(-1), "; make it contiguous");
  }
  void check_sizes(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    KP_CHECK(std::ranges::equal(view.shape(), sizes), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({sizes.begin(), sizes.size()}));
  }
  // Rows of the leader's type.
  void check_rows(std::string_view name, const TensorView& view, int64_t rows, int64_t columns) const {
    check_tensor(name, view, 2);
    KP_CHECK(view.dtype == leader.dtype, op, ": ", name, " is ", view.dtype, ", ", leader_name, " is ", leader.dtype,
             "; convert one of them");
    check_sizes(name, view, {rows, columns});
    check_dense(name, view);
  }
  void check_contiguous(std::string_view name, const TensorView& view, DType dtype,
                        std::initializer_list<int64_t> sizes) const {
    check_tensor(name, view, static_cast<int>(sizes.size()));
    KP_CHECK(view.dtype == dtype, op, ": ", name, " is ", view.dtype, "; it must be ", dtype);
    check_sizes(name, view, sizes);
    KP_CHECK(is_contiguous(view), op, ": ", name, " has strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; make it contiguous");
  }
  // [tokens, k] of pairs.
  void check_pairs(const TensorView& row_of_token) const {
    check_tensor("row_of_token", row_of_token, 2);
    const int64_t tokens = row_of_token.sizes[0], k = row_of_token.sizes[1];
    check_contiguous("row_of_token", row_of_token, DType::kInt32, {tokens, k});
    KP_CHECK(k <= kMostChosen, op, ": a token has ", k, " rows; at most ", kMostChosen, " are supported");
    KP_CHECK(tokens * k < std::numeric_limits<int32_t>::max(), op, ": ", tokens, " tokens with ", k,
             " experts each are 2^31 rows or more; split the tokens");
  }
  DType wide() const { return statistic_type(leader.dtype); }
};

void set_row_strides(std::initializer_list<TensorView*> views) {
  for (TensorView* view : views) {
    if (!view->is_present()) continue;
    if (view->sizes[1] <= 1 || view->element_count() == 0) view->strides[1] = 1;
    if (view->sizes[0] <= 1) view->strides[0] = view->sizes[1];
  }
}

template <class Problem>
void check_layer(const MixtureCheck& check, const Problem& problem) {
  check.check_leader(2);
  check.check_pairs(problem.row_of_token);
  check.check_tensor("gate_up", problem.gate_up, 3);
  check.check_tensor("down", problem.down, 3);
  const int64_t tokens = problem.x.sizes[0], in = problem.x.sizes[1], k = problem.row_of_token.sizes[1];
  const int64_t experts = problem.gate_up.sizes[0], columns = problem.gate_up.sizes[problem.transposed ? 1 : 2];
  KP_CHECK(problem.gate_up.sizes[problem.transposed ? 2 : 1] == in, check.op, ": gate_up has shape ",
           shape_text(problem.gate_up.shape()), ", x has ", shape_text(problem.x.shape()), "; gate_up must be ",
           problem.transposed ? "[experts, columns, in]" : "[experts, in, columns]");
  KP_CHECK(problem.form == Form::kPlain || columns % 2 == 0, check.op, ": gate_up has ", columns,
           " columns; gates and ups need an even number");
  const int64_t inner = problem.form == Form::kPlain ? columns : columns / 2;
  if (problem.transposed) {
    check.check_sizes("down", problem.down, {experts, in, inner});
  } else {
    check.check_sizes("down", problem.down, {experts, inner, in});
  }
  KP_CHECK(problem.row_of_token.sizes[0] == tokens, check.op, ": row_of_token has shape ",
           shape_text(problem.row_of_token.shape()), ", x has ", tokens, " tokens; route the same tokens");
  check.check_contiguous("weights", problem.weights, check.wide(), {tokens, k});
  check.check_contiguous("chosen", problem.experts, DType::kInt32, {tokens, k});
  check.check_contiguous("offsets", problem.offsets, DType::kInt32, {experts});
  check.check_contiguous("token_of_row", problem.token_of_row, DType::kInt32, {tokens * k});
}

}  // namespace

void check(Combine& problem, Device device) {
  const MixtureCheck check{"moe_combine", "y", problem.y, device};
  check.check_leader(2);
  check.check_pairs(problem.row_of_token);
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
  if (problem.weights.is_present()) check.check_contiguous("weights", problem.weights, check.wide(), {tokens, k});
  check.check_contiguous("output", problem.output, problem.y.dtype, {tokens, problem.y.sizes[1]});
  set_row_strides({&problem.y, &problem.output});
}

void check(CombineBackward& problem, Device device) {
  const MixtureCheck check{"moe_combine backward", "y", problem.y, device};
  check.check_leader(2);
  check.check_pairs(problem.row_of_token);
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
  const int64_t rows = problem.y.sizes[0], columns = problem.y.sizes[1];
  check.check_rows("grad_output", problem.grad_output, tokens, columns);
  if (problem.weights.is_present()) check.check_contiguous("weights", problem.weights, check.wide(), {tokens, k});
  if (problem.grad_y.is_present()) check.check_contiguous("grad_y", problem.grad_y, problem.y.dtype, {rows, columns});
  if (problem.grad_weights.is_present()) {
    check.check_contiguous("grad_weights", problem.grad_weights, check.wide(), {tokens, k});
  }
  set_row_strides({&problem.y, &problem.grad_output, &problem.grad_y});
}

void check(ActivationBackward& problem, Device device) {
  const MixtureCheck check{"moe_activation_backward", "grad_hidden", problem.grad_hidden, device};
  check.check_leader(2);
  check.check_pairs(problem.row_of_token);
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1];
  const int64_t rows = problem.grad_hidden.sizes[0], inner = problem.grad_hidden.sizes[1];
  const int64_t columns = problem.form == Form::kPlain ? inner : 2 * inner;
  check.check_rows("preactivation", problem.preactivation, rows, columns);
  check.check_rows("grad_preactivation", problem.grad_preactivation, rows, columns);
  check.check_rows("hidden", problem.hidden, rows, inner);
  check.check_contiguous("weights", problem.weights, check.wide(), {tokens, k});
  check.check_contiguous("grad_weights", problem.grad_weights, check.wide(), {tokens, k});
  if (problem.row_weights.is_present()) {
    check.check_contiguous("row_weights", problem.row_weights, check.wide(), {rows});
  }
  KP_CHECK(problem.limit == 0 || (problem.form != Form::kPlain && problem.activation == Kind::kSilu), check.op,
           ": limit is ", problem.limit, "; only a gate with activation silu has one");
  if (problem.down_bias.is_present()) {
    check.check_tensor("down_bias", problem.down_bias, 2);
    check.check_dense("down_bias", problem.down_bias);
    const bool is_known = problem.down_bias.dtype == problem.grad_hidden.dtype ||
                          (problem.down_bias.dtype == DType::kFloat32 && problem.grad_hidden.dtype != DType::kFloat64);
    KP_CHECK(is_known, check.op, ": down_bias is ", problem.down_bias.dtype, ", grad_hidden is ",
             problem.grad_hidden.dtype, "; it must have that type or be fp32");
    check.check_rows("grad_output", problem.grad_output, tokens, problem.down_bias.sizes[1]);
    check.check_contiguous("experts", problem.experts, DType::kInt32, {tokens, k});
  }
  set_row_strides({&problem.grad_hidden, &problem.preactivation, &problem.grad_preactivation, &problem.hidden,
                   &problem.grad_output, &problem.down_bias});
}

void check(Forward& problem, Device device) {
  const MixtureCheck check{"moe_mlp", "x", problem.x, device};
  check_layer(check, problem);
  check.check_contiguous("output", problem.output, problem.x.dtype, {problem.x.sizes[0], problem.x.sizes[1]});
  set_row_strides({&problem.x, &problem.output});
}

void check(Backward& problem, Device device) {
  const MixtureCheck check{"moe_mlp backward", "x", problem.x, device};
  check_layer(check, problem);
  check.check_rows("grad_output", problem.grad_output, problem.x.sizes[0], problem.x.sizes[1]);
  check.check_rows("preactivation", problem.preactivation, problem.token_of_row.sizes[0],
                   problem.gate_up.sizes[problem.transposed ? 1 : 2]);
  set_row_strides({&problem.x, &problem.grad_output, &problem.preactivation});
}

}  // namespace kernel_pytorch::moe_mlp
