#include "kernel_pytorch/ops/engines/row_norm/check.h"

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/support/argument_check.h"

namespace kernel_pytorch::row_norm {
namespace {

std::string_view name_of(Norm norm) {
  return norm == Norm::kRms ? "rms_norm" : "layer_norm";
}

// A member that only the other norm has.
void check_absent(std::string_view op, std::string_view name, const TensorView& view) {
  KP_CHECK(!view.is_present(), op, ": ", name, " is given, but ", op, " has none; leave it out");
}

}  // namespace

void check_and_merge(Norm norm, ForwardProblem& problem, Device device) {
  const std::string_view op = name_of(norm);
  problem.norm = norm;
  const ArgumentCheck check{op, "x", problem.x, device};
  check.check_main();
  if (norm == Norm::kRms) {
    check_absent(op, "bias", problem.bias);
    check_absent(op, "mean", problem.mean);
  }
  if (!problem.eps.has_value()) problem.eps = norm == Norm::kRms ? 1e-6 : 1e-5;
  check.check_like_or_narrow("residual", problem.residual);
  check.check_columns("weight", problem.weight);
  check.check_columns("bias", problem.bias);
  check.check_same_type("bias", problem.bias, "weight", problem.weight);
  KP_CHECK(*problem.eps >= 0 && std::isfinite(*problem.eps), op, ": eps is ", *problem.eps,
           "; it must be finite and not negative");
  KP_CHECK(std::isfinite(problem.weight_offset), op, ": weight_offset is ", problem.weight_offset,
           "; it must be finite");
  KP_CHECK(problem.output.is_present(), op, ": output is missing");
  check.check_like_or_narrow("output", problem.output);
  check.check_contiguous("output", problem.output);
  KP_CHECK(problem.sum.is_present() == problem.residual.is_present(), op,
           ": residual and sum go together: residual is ", problem.residual.is_present() ? "given" : "absent",
           ", sum is ", problem.sum.is_present() ? "given" : "absent");
  check.check_output("sum", problem.sum);
  check.check_statistics("mean", problem.mean);
  check.check_statistics("rstd", problem.rstd);
  TensorView* views[] = {&problem.x, &problem.residual, &problem.output, &problem.sum};
  merge_leading_dimensions(views);
}

void check_and_merge(Norm norm, BackwardProblem& problem, Device device) {
  const std::string_view op = name_of(norm);
  problem.norm = norm;
  const ArgumentCheck check{op, "value", problem.value, device};
  check.check_main();
  if (norm == Norm::kRms) {
    check_absent(op, "bias", problem.bias);
    check_absent(op, "mean", problem.mean);
    check_absent(op, "grad_bias", problem.grad_bias);
  }
  KP_CHECK(problem.grad_output.is_present(), op, ": grad_output is missing");
  check.check_like_or_narrow("grad_output", problem.grad_output);
  check.check_columns("weight", problem.weight);
  KP_CHECK(problem.rstd.is_present(), op, ": rstd is missing; forward returns it");
  KP_CHECK(problem.norm == Norm::kRms || problem.mean.is_present(), op, ": mean is missing; forward returns it");
  check.check_statistics("mean", problem.mean);
  check.check_statistics("rstd", problem.rstd);
  check.check_like("grad_sum", problem.grad_sum);
  check.check_output("grad_input", problem.grad_input);
  check.check_columns("grad_weight", problem.grad_weight);
  check.check_columns("grad_bias", problem.grad_bias);
  check.check_same_type("grad_weight", problem.grad_weight, "weight", problem.weight);
  check.check_same_type("grad_bias", problem.grad_bias, "grad_weight", problem.grad_weight);
  TensorView* views[] = {&problem.value, &problem.grad_output, &problem.grad_sum, &problem.grad_input};
  merge_leading_dimensions(views);
}

}  // namespace kernel_pytorch::row_norm
