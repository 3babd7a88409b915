// erase: an Operation<Problem> without its type, for whoever goes over every op. What the result does with a problem is
// ordinary code on an AnyProblem (any_operation.cpp), so that an op adds only what its type is needed for.
#pragma once

#include <memory>
#include <vector>

#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::registry {

// `operation` must live as long as the result: operations are constants of their folders.
template <class Problem>
AnyOperation erase(const Operation<Problem>& operation) {
  const Operation<Problem>* op = &operation;
  AnyOperation any;
  any.name = operation.name;
  for (const Kernel<Problem>& kernel : operation.kernels()) any.kernel_names.emplace_back(kernel.name);
  any.make_on = [op](const ProblemRequest& request, const DeviceInfo& device) {
    return std::make_unique<OwnedProblem<Problem>>(*op, make_problem(*op, request), device);
  };
  any.shapes = [op] { return op->shapes(); };
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
