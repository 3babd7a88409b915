// erase: an Operation<Problem> without its type, for whoever goes over every op. What the result does is in explain.h,
// tune.h, bench.h and verify.h, on an AnyProblem.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/bench.h"
#include "kernel_pytorch/registry/explain.h"
#include "kernel_pytorch/registry/tune.h"
#include "kernel_pytorch/registry/verify.h"

namespace kernel_pytorch::registry {

// `operation` must live as long as the result: operations are constants of their rooms.
template <class Problem>
AnyOperation erase(const Operation<Problem>& operation) {
  const Operation<Problem>* op = &operation;
  const auto make = [op](const ProblemRequest& request) {
    return OwnedProblem<Problem>(*op, op->make(request), device_info(request.device));
  };
  AnyOperation any;
  any.name = operation.name;
  for (const Kernel<Problem>& kernel : operation.kernels()) any.kernel_names.emplace_back(kernel.name);
  any.candidates = [make](const ProblemRequest& request) { return explain_candidates(make(request)); };
  any.explain = [make](const ProblemRequest& request, std::string_view kernel_override) {
    return explain(make(request), kernel_override);
  };
  any.tune = [make](const ProblemRequest& request, const tuning::TuneOptions& options) {
    return tune(make(request), options);
  };
  any.bench = [make](const ProblemRequest& request, bool every_kernel, double seconds_each) {
    BenchReport report = bench(make(request), every_kernel, seconds_each);
    report.request = request;
    return report;
  };
  any.verify = [make](const ProblemRequest& request) { return verify(make(request)); };
  any.shapes = [op] { return op->shapes != nullptr ? op->shapes() : std::vector<ProblemRequest>(); };
  any.device_code = [op] {
    std::vector<DeviceCode> codes;
    for (const Kernel<Problem>& kernel : op->kernels()) {
      if (kernel.device_code == nullptr) continue;
      for (DeviceCode& code : kernel.device_code()) codes.push_back(std::move(code));
    }
    return codes;
  };
  return any;
}

}  // namespace kernel_pytorch::registry
