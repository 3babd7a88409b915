#include "kernel_pytorch/ops/matmul/matmul.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::matmul {

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kMultiply, problem, context);
}

void multiply_by_vendor(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  Context inner = context;
  if (inner.kernel_override.empty() && kCublasLt.supports(problem, *context.info)) {
    inner.kernel_override = kCublasLt.name;
  }
  registry::run_best(kMultiply, problem, inner);
}

Precision precision_of(std::string_view word) {
  constexpr std::string_view kWords[] = {"full", "tf32", "bf16", "bf16x3"};
  const auto found = std::ranges::find(kWords, word);
  KP_CHECK(found != std::end(kWords), "matmul: precision is \"", word, "\"; it is one of full, tf32, bf16, bf16x3");
  return static_cast<Precision>(found - std::begin(kWords));
}

}  // namespace kernel_pytorch::matmul
