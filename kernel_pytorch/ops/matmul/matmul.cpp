#include "kernel_pytorch/ops/matmul/matmul.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::matmul {

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kMultiply, problem, context);
}

std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device) {
  Product problem = arguments;
  check(problem, device.device);
  return std::make_unique<registry::OwnedProblem<Product>>(kMultiply, problem, device);
}

std::unique_ptr<registry::AnyProblem> problem_of(const PairGradient& arguments, const DeviceInfo& device) {
  return std::make_unique<registry::OwnedProblem<PairGradient>>(kPairGradient, arguments, device);
}

Precision precision_of(std::string_view word) {
  constexpr std::string_view kWords[] = {"full", "tf32", "bf16", "bf16x3"};
  const auto found = std::ranges::find(kWords, word);
  KP_CHECK(found != std::end(kWords), "matmul: precision is \"", word, "\"; it is one of full, tf32, bf16, bf16x3");
  return static_cast<Precision>(found - std::begin(kWords));
}

}  // namespace kernel_pytorch::matmul
