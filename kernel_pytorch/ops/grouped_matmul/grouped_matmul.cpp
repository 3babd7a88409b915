#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

// Offsets and gathers that the host may read; a GPU's offsets only with KERNEL_PYTORCH_CHECK=1.
template <class Problem>
void check_offsets(std::string_view op, const Problem& problem, const Context& context) {
  const TensorView& offsets = problem.offsets;
  const int64_t rows = rows_of(problem);
  if (context.device().kind != DeviceKind::kCpu) {
    check_offset_values({.op = op, .name = "offsets", .offsets = offsets, .tensor = "the rows", .tokens = rows},
                        context);
    return;
  }
  if (Rehearsal::is_running()) return;
  int32_t before = 0;
  for (int64_t group = 0; group < offsets.sizes[0]; ++group) {
    const int32_t end = offsets.as<const int32_t>()[group];
    KP_CHECK(end >= before && end <= rows, op, ": offsets[", group, "] is ", end, " after ", before, ", and there are ",
             rows, " rows; offsets are where groups end, ascending");
    before = end;
  }
}

// Of rows that are in a group.
void check_gather(std::string_view op, const TensorView& gather, const TensorView& offsets, int64_t source,
                  const Context& context) {
  if (!gather.is_present() || Rehearsal::is_running() || context.device().kind != DeviceKind::kCpu) return;
  const int64_t groups = offsets.sizes[0], end = groups == 0 ? 0 : offsets.as<const int32_t>()[groups - 1];
  for (int64_t row = 0; row < end; ++row) {
    const int32_t line = gather.as<const int32_t>()[row];
    KP_CHECK(line >= 0 && line < source, op, ": gather[", row, "] is ", line, ", the tensor has ", source,
             " rows; it must be one of them");
  }
}

template <class Problem>
std::unique_ptr<registry::AnyProblem> owned(const registry::Operation<Problem>& operation, const Problem& arguments,
                                            const DeviceInfo& device) {
  Problem problem = arguments;
  check(problem, device.device);
  return std::make_unique<registry::OwnedProblem<Problem>>(operation, problem, device);
}

}  // namespace

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  check_offsets("grouped_matmul", problem, context);
  check_gather("grouped_matmul", problem.gather, problem.offsets, problem.a.sizes[0], context);
  registry::run_best(kMultiply, problem, context);
}

void weight_gradient(const WeightGradient& arguments, Context& context) {
  WeightGradient problem = arguments;
  check(problem, context.device());
  check_offsets("grouped_matmul_weight", problem, context);
  check_gather("grouped_matmul_weight", problem.gather_a, problem.offsets, problem.a.sizes[0], context);
  check_gather("grouped_matmul_weight", problem.gather_b, problem.offsets, problem.b.sizes[0], context);
  registry::run_best(kWeightGradient, problem, context);
}

void sum(const Sums& arguments, Context& context) {
  Sums problem = arguments;
  check(problem, context.device());
  check_offsets("group_sums", problem, context);
  check_gather("group_sums", problem.gather, problem.offsets, problem.x.sizes[0], context);
  registry::run_best(kSums, problem, context);
}

std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device) {
  return owned(kMultiply, arguments, device);
}
std::unique_ptr<registry::AnyProblem> problem_of(const WeightGradient& arguments, const DeviceInfo& device) {
  return owned(kWeightGradient, arguments, device);
}
std::unique_ptr<registry::AnyProblem> problem_of(const Sums& arguments, const DeviceInfo& device) {
  return owned(kSums, arguments, device);
}

}  // namespace kernel_pytorch::grouped_matmul
