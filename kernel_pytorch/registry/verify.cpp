#include "kernel_pytorch/registry/verify.h"

#include <memory>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/explain.h"
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

// The configs of every supported kernel that `is_wanted` accepts.
template <class IsWanted>
std::vector<std::string> verify_those(const AnyProblem& given, const IsWanted& is_wanted) {
  const std::unique_ptr<AnyProblem> smaller =
      largest_tensor(given) > kMostElements ? given.shrink(kMostElements) : nullptr;
  const AnyProblem& problem = smaller != nullptr ? *smaller : given;
  OwnContext own(problem.device().device);
  ReferenceCheck check(problem, own);
  std::vector<std::string> failures;
  for (int kernel = 0; kernel < problem.kernel_count(); ++kernel) {
    if (!problem.supports(kernel)) continue;
    for (const std::string& config : problem.configs(kernel)) {
      if (!is_wanted(problem.kernel_name(kernel), config)) continue;
      const std::string failure = check_one(check, kernel, config);
      if (failure.empty()) continue;
      failures.push_back(
          concat(problem.op(), "/", problem.kernel_name(kernel), config.empty() ? "" : " ", config, ": ", failure));
    }
  }
  return failures;
}

}  // namespace

std::vector<std::string> verify(const AnyProblem& problem) {
  return verify_those(problem, [](std::string_view, const std::string&) { return true; });
}

std::vector<std::string> verify_chosen(const AnyProblem& problem) {
  const Explanation chosen = explain(problem, "");
  if (chosen.chosen_kernel.empty()) return {concat(problem.op(), ": no kernel supports this problem here")};
  bool is_found = false;
  std::vector<std::string> failures = verify_those(problem, [&](std::string_view kernel, const std::string& config) {
    const bool is_chosen = kernel == chosen.chosen_kernel && config == chosen.chosen_config;
    is_found |= is_chosen;
    return is_chosen;
  });
  if (!is_found) failures.push_back(concat(problem.op(), "/", chosen.chosen_kernel, ": its config was not tried"));
  return failures;
}

}  // namespace kernel_pytorch::registry
