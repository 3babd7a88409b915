#include "kernel_pytorch/ops/matmul/matmul.h"

#include <algorithm>

#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::matmul {

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kMultiply, problem, context);
}

void accumulate(const Product& arguments, Context& context) {
  Product product = arguments;
  product.residual = arguments.output;
  multiply(product, context);
}

bool has_kernel(const Product& arguments, const DeviceInfo& device) {
  Product problem = arguments;
  check(problem, device.device);
  const auto kernels = kMultiply.kernels();
  const auto takes = [&](const registry::Kernel<Product>& kernel) { return bool(kernel.supports(problem, device)); };
  return std::ranges::any_of(kernels.first(kernels.size() - 1), takes);  // the last is the reference
}

std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device) {
  Product problem = arguments;
  check(problem, device.device);
  return std::make_unique<registry::OwnedProblem<Product>>(kMultiply, problem, device);
}

std::unique_ptr<registry::AnyProblem> problem_of(const PairGradient& arguments, const DeviceInfo& device) {
  return std::make_unique<registry::OwnedProblem<PairGradient>>(kPairGradient, arguments, device);
}

}  // namespace kernel_pytorch::matmul
