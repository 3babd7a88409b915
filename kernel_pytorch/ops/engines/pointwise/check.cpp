// Argument checks of the pointwise ops.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/support/argument_check.h"

namespace kernel_pytorch::pointwise {
namespace {

void check_dropout(const ArgumentCheck& check, double dropout, const TensorView& seed) {
  KP_CHECK(dropout >= 0 && dropout <= 1, check.op, ": dropout_p is ", dropout, "; it must lie between 0 and 1");
  if (dropout == 0) return;
  KP_CHECK(seed.is_present(), check.op, ": dropout_p is ", dropout,
           " and seed is missing; give an int64 tensor of two, the seed and the offset");
  check.check_device("seed", seed);
  KP_CHECK(seed.dtype == DType::kInt64 && seed.rank == 1 && seed.size(0) == 2 && seed.stride(0) == 1, check.op,
           ": seed is ", seed, "; it must be int64[2], contiguous: the seed and the offset");
}

// Written by row: no gaps between columns, no two rows in one place.
void check_gradient(const ArgumentCheck& check, std::string_view name, const TensorView& view) {
  if (!view.is_present()) return;
  check.check_like(name, view);
  const bool columns_are_dense = columns_of(view) <= 1 || view.stride(-1) == 1;
  KP_CHECK(columns_are_dense, check.op, ": ", name, " has column stride ", view.stride(-1), "; it must be 1");
}

// These ops take fp64 on a GPU, too.
void check_leading(const ArgumentCheck& check) {
  if (check.main.is_present() && check.main.dtype == DType::kFloat64 && check.main.rank >= 1) {
    return check.check_device(check.main_name, check.main);
  }
  check.check_main();
}

}  // namespace

void check_and_merge(std::string_view op, std::string_view gate_name, ForwardProblem& problem, Device device) {
  const ArgumentCheck check{op, gate_name, problem.gate, device};
  check_leading(check);
  check.check_like("up", problem.up);
  check.check_columns("bias", problem.gate_bias);
  check.check_columns("up_bias", problem.up_bias);
  check.check_same_type("up_bias", problem.up_bias, "bias", problem.gate_bias);
  check.check_like("residual", problem.residual);
  check_dropout(check, problem.dropout, problem.seed);
  KP_CHECK(problem.output.is_present(), op, ": output is missing");
  check.check_output("output", problem.output);
  TensorView* views[] = {&problem.gate, &problem.up, &problem.residual, &problem.output};
  merge_leading_dimensions(views);
}

void check_and_merge(std::string_view op, std::string_view gate_name, BackwardProblem& problem, Device device) {
  const ArgumentCheck check{op, gate_name, problem.gate, device};
  check_leading(check);
  KP_CHECK(problem.grad_output.is_present(), op, ": grad_output is missing");
  check.check_like("grad_output", problem.grad_output);
  check.check_like("up", problem.up);
  check.check_columns("bias", problem.gate_bias);
  check.check_columns("up_bias", problem.up_bias);
  check.check_same_type("up_bias", problem.up_bias, "bias", problem.gate_bias);
  check_dropout(check, problem.dropout, problem.seed);
  KP_CHECK(problem.grad_gate.is_present(), op, ": the gradient of ", gate_name, " is missing");
  check_gradient(check, "grad_gate", problem.grad_gate);
  KP_CHECK(problem.grad_up.is_present() == problem.up.is_present(), op, ": up is ",
           problem.up.is_present() ? "given" : "absent", " and grad_up is ",
           problem.grad_up.is_present() ? "given" : "absent", "; they go together");
  check_gradient(check, "grad_up", problem.grad_up);
  check.check_columns("grad_bias", problem.grad_gate_bias);
  check.check_columns("grad_up_bias", problem.grad_up_bias);
  check.check_same_type("grad_bias", problem.grad_gate_bias, "bias", problem.gate_bias);
  check.check_same_type("grad_up_bias", problem.grad_up_bias, "grad_bias", problem.grad_gate_bias);
  TensorView* views[] = {&problem.gate, &problem.up, &problem.grad_output, &problem.grad_gate, &problem.grad_up};
  merge_leading_dimensions(views);
}

}  // namespace kernel_pytorch::pointwise
