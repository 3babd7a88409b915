#include "kernel_pytorch/registry/verify.h"

#include <memory>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/trial.h"

namespace kernel_pytorch::registry {
namespace {

constexpr int64_t kMostElements = int64_t{32} << 20;

int64_t largest_tensor(const AnyProblem& problem) {
  int64_t largest = 0;
  for (const ProblemTensor& tensor : problem.tensors()) largest = std::max(largest, tensor.view.element_count());
  return largest;
}

// A kernel that throws is a failure like another, and the rest still wants to be seen.
std::string check_one(ReferenceCheck& check, int kernel, const std::string& config) {
  std::string failure;
  try {
    check.try_check(kernel, config, failure);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  return failure;
}

}  // namespace

std::vector<std::string> verify(const AnyProblem& given) {
  const std::unique_ptr<AnyProblem> smaller =
      largest_tensor(given) > kMostElements ? given.shrink(kMostElements) : nullptr;
  const AnyProblem& problem = smaller != nullptr ? *smaller : given;
  OwnContext own(problem.device().device);
  ReferenceCheck check(problem, own);
  std::vector<std::string> failures;
  for (int kernel = 0; kernel < problem.kernel_count(); ++kernel) {
    if (!problem.supports(kernel)) continue;
    for (const std::string& config : problem.configs(kernel)) {
      const std::string failure = check_one(check, kernel, config);
      if (failure.empty()) continue;
      failures.push_back(
          concat(problem.op(), "/", problem.kernel_name(kernel), config.empty() ? "" : " ", config, ": ", failure));
    }
  }
  return failures;
}

}  // namespace kernel_pytorch::registry
