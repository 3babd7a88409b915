#include "kernel_pytorch/registry/tune.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "kernel_pytorch/registry/slow_path.h"
#include "kernel_pytorch/registry/trial.h"

namespace kernel_pytorch::registry {
namespace {

// A scalar reference takes some 10 ns an element, so the first of these keeps a check far below 100 ms. Kernels for
// many rows do not take so few; they are checked on the least multiple that they take.
constexpr int64_t kFirstCheckedElements = 1 << 18;
constexpr int64_t kCheckGrowth = 4;
constexpr double kLeastSeconds = 1e-3;  // left for measuring: enough to begin with the first candidate

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

// Checks candidates on as few rows as each of them takes; the reference's answer for each size is computed once.
class Checker {
 public:
  Checker(const AnyProblem& problem, const Context& context) : problem_(problem), context_(context) {
    for (const ProblemTensor& tensor : problem.tensors()) {
      largest_tensor_ = std::max(largest_tensor_, tensor.view.element_count());
    }
  }
  std::string check(const Try& one) {
    std::string failure;
    int64_t elements = kFirstCheckedElements;
    for (size_t size = 0; size == 0 || elements / kCheckGrowth < largest_tensor_; ++size, elements *= kCheckGrowth) {
      if (size == sizes_.size()) sizes_.push_back({problem_.shrink(elements), nullptr});
      Size& at = sizes_[size];
      if (!at.problem->supports(one.kernel)) continue;
      if (at.check == nullptr) at.check = std::make_unique<ReferenceCheck>(*at.problem, context_);
      if (at.check->try_check(one.kernel, one.text, failure)) return failure;
    }
    return "does not take the problem on memory of its own";
  }

 private:
  struct Size {
    std::unique_ptr<AnyProblem> problem;
    std::unique_ptr<ReferenceCheck> check;
  };
  const AnyProblem& problem_;
  const Context& context_;
  int64_t largest_tensor_ = 0;
  std::vector<Size> sizes_;
};

}  // namespace

int candidate_count(const AnyProblem& problem) {
  return static_cast<int>(list_tries(problem).size());
}

tuning::TuneReport tune(const AnyProblem& problem, const Context& context, const tuning::TuneOptions& options) {
  const auto start = std::chrono::steady_clock::now();
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
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  with_rotations.budget_seconds = std::max(options.budget_seconds - spent, kLeastSeconds);
  return tuning::autotune(make_key(problem), candidates, trial.context(), with_rotations);
}

tuning::TuneReport tune(const AnyProblem& problem, const tuning::TuneOptions& options) {
  OwnContext own(problem.device().device);
  return tune(problem, own, options);
}

}  // namespace kernel_pytorch::registry
