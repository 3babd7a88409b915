#include "kernel_pytorch/registry/tune.h"

#include <algorithm>
#include <memory>

#include "kernel_pytorch/registry/slow_path.h"
#include "kernel_pytorch/registry/trial.h"

namespace kernel_pytorch::registry {
namespace {

// A scalar reference takes some 10 ns an element, so this keeps a check well under 100 ms.
constexpr int64_t kCheckedElements = 1 << 18;

struct Try {
  int kernel = 0;
  int config = 0;
  std::string text;
};

std::vector<Try> list_tries(const AnyProblem& problem) {
  std::vector<Try> tries;
  const int reference = problem.kernel_count() - 1;
  int favourite_kernel = -1;
  for (int kernel = 0; kernel < problem.kernel_count(); ++kernel) {
    if (!problem.supports(kernel) || (kernel == reference && !tries.empty())) continue;
    if (favourite_kernel < 0) favourite_kernel = kernel;
    const std::vector<std::string> configs = problem.configs(kernel);
    for (size_t i = 0; i < configs.size(); ++i) tries.push_back({kernel, static_cast<int>(i), configs[i]});
  }
  if (favourite_kernel < 0) return tries;
  const int favourite_config = problem.heuristic(favourite_kernel);
  std::stable_partition(tries.begin(), tries.end(), [&](const Try& one) {
    return one.kernel == favourite_kernel && one.config == favourite_config;
  });
  return tries;
}

// Checks on a few rows, and on the whole problem for kernels that do not take so few.
class Checker {
 public:
  Checker(const AnyProblem& problem, const Context& context) : problem_(problem), context_(context) {}
  std::string check(const Try& one) {
    std::string failure;
    if (few_rows_ == nullptr) {
      shrunk_ = problem_.shrink(kCheckedElements);
      few_rows_ = std::make_unique<ReferenceCheck>(*shrunk_, context_);
    }
    if (few_rows_->try_check(one.kernel, one.text, failure)) return failure;
    if (whole_ == nullptr) whole_ = std::make_unique<ReferenceCheck>(problem_, context_);
    if (whole_->try_check(one.kernel, one.text, failure)) return failure;
    return "does not take the problem on memory of its own";
  }

 private:
  const AnyProblem& problem_;
  const Context& context_;
  std::unique_ptr<AnyProblem> shrunk_;
  std::unique_ptr<ReferenceCheck> few_rows_, whole_;
};

}  // namespace

tuning::TuneReport tune(const AnyProblem& problem, const Context& context, const tuning::TuneOptions& options) {
  tuning::refuse_while_capturing(context);
  const std::vector<Try> tries = list_tries(problem);
  if (tries.empty()) {
    OwnContext own(context.device(), context.stream);
    select(problem, own);  // throws with every kernel's reason
  }
  TrialContext trial(context);
  Checker checker(problem, trial.context());
  const RotatedProblem rotated(problem, trial.context());
  std::vector<tuning::Candidate> candidates;
  for (const Try& one : tries) {
    tuning::Candidate candidate;
    candidate.kernel = problem.kernel_name(one.kernel);
    candidate.config = one.text;
    candidate.run = [&rotated, &trial, &one](int rotation) { trial.run(rotated.at(rotation), one.kernel, one.config); };
    candidate.check = [&checker, &one] { return checker.check(one); };
    candidates.push_back(std::move(candidate));
  }
  tuning::TuneOptions with_rotations = options;
  with_rotations.rotations = rotated.rotations();
  return tuning::autotune(make_key(problem), candidates, trial.context(), with_rotations);
}

tuning::TuneReport tune(const AnyProblem& problem, const tuning::TuneOptions& options) {
  OwnContext own(problem.device().device);
  return tune(problem, own, options);
}

}  // namespace kernel_pytorch::registry
