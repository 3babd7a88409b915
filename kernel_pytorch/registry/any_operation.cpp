#include "kernel_pytorch/registry/any_operation.h"

#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/bench.h"
#include "kernel_pytorch/registry/explain.h"
#include "kernel_pytorch/registry/tune.h"
#include "kernel_pytorch/registry/verify.h"

namespace kernel_pytorch::registry {

AnyProblem::~AnyProblem() = default;

namespace detail {

void collect_tensor(void* tensors, std::string_view name, Role role, TensorView& view) {
  static_cast<std::vector<ProblemTensor>*>(tensors)->push_back({.name = std::string(name), .role = role, .view = view});
}

void bind_tensor(void* state, std::string_view, Role, TensorView& view) {
  Binding& binding = *static_cast<Binding*>(state);
  view.data = binding.memory[binding.next++];
  view.device = binding.device;
}

}  // namespace detail

std::unique_ptr<AnyProblem> AnyOperation::make(const ProblemRequest& request) const {
  return make_on(request, device_info(request.device));
}

std::vector<KernelSupport> AnyOperation::supports(const ProblemRequest& request) const {
  return registry::supports(*make(request));
}

std::vector<CandidateExplanation> AnyOperation::candidates(const ProblemRequest& request) const {
  return explain_candidates(*make(request));
}

Explanation AnyOperation::explain(const ProblemRequest& request, std::string_view kernel_override) const {
  return registry::explain(*make(request), kernel_override);
}

tuning::TuneReport AnyOperation::tune(const ProblemRequest& request, const tuning::TuneOptions& options) const {
  return registry::tune(*make(request), options);
}

BenchReport AnyOperation::bench(const ProblemRequest& request, bool every_kernel, double seconds_each) const {
  BenchReport report = registry::bench(*make(request), every_kernel, seconds_each);
  report.request = request;
  return report;
}

std::vector<std::string> AnyOperation::verify(const ProblemRequest& request) const {
  return registry::verify(*make(request));
}

}  // namespace kernel_pytorch::registry
