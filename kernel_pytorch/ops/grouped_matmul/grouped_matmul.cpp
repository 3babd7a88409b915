#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"

#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

template <class Problem>
void check_offsets(std::string_view op, const Problem& problem, const Context& context) {
  check_offset_values(
      {.op = op, .name = "offsets", .offsets = problem.offsets, .tensor = "the rows", .tokens = rows_of(problem)},
      context);
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
  registry::run_best(kMultiply, problem, context);
}

void weight_gradient(const WeightGradient& arguments, Context& context) {
  WeightGradient problem = arguments;
  check(problem, context.device());
  check_offsets("grouped_matmul_weight", problem, context);
  registry::run_best(kWeightGradient, problem, context);
}

void sum(const Sums& arguments, Context& context) {
  Sums problem = arguments;
  check(problem, context.device());
  check_offsets("group_sums", problem, context);
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
