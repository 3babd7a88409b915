// What an Operation derives from the fields of its problem: visiting tensors, the tuning key, problems made of requests
// and smaller ones.
//
//   constinit const Operation<Forward> kForward =
//       declared<Forward, kForwardFields, flops>({.name = "rms_norm_forward", .kernels = kernels, .check = check});
#pragma once

#include <type_traits>

#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

void visit_fields(const Fields& fields, void* problem, TensorVisitor visit, void* state);
// Every part of the key is in it always, absent ones as such, so that two problems never share a key by leaving
// different fields out.
void describe_fields(const Fields& fields, const void* problem, tuning::KeyBuilder& key);
// A request's shape is that of the leading input, or gives the dimensions that `form` names. Options: NAME=VALUE for an
// option or a dimension of `form.sizes`; NAME=0|1|TYPE for a tensor that may be absent; NAME_dtype=TYPE for one whose
// type no rule gives; FLAG=0|1 for the flag that asks for an output. Outputs are made, those that depend on an input
// only with it.
void make_fields(std::string_view op, const Fields& fields, const RequestForm& form, const ProblemRequest& request,
                 void* problem);
// The part of make_fields that is about options alone, for an op that makes its tensors itself; what requests may say
// of them.
void make_options(const Fields& fields, const ProblemRequest& request, void* problem);
std::vector<std::string_view> option_names(const Fields& fields);
// Keeps a part of one dimension, the leading tensor's first unless it is named, in every tensor whose shape has it, so
// much that none of them has more than `elements` elements. Any dimensions in front are one after an op's check; where
// they did not merge, the problem stays.
void shrink_fields(const Fields& fields, void* problem, int64_t elements, std::string_view dimension = {});
// A TensorVisitor: moves a tensor to a Device.
KP_EXPORT void set_device(void* device, std::string_view name, Role role, TensorView& view);

int64_t bytes_of_fields(const Fields& fields, const void* problem);

// A problem as a request asks for it, checked by the op itself: trials and the command line pass what every call
// passes. fp64 is checked as on the CPU, then moved: that a GPU has no kernel for it is a kernel's reason, not a bad
// request.
template <class Problem>
Problem make_problem(const Operation<Problem>& operation, const ProblemRequest& request) {
  ProblemRequest checked = request;
  if (request.dtype == DType::kFloat64) checked.device = Device{};
  Problem problem{};
  if (operation.make != nullptr) {
    problem = operation.make(checked);
  } else {
    make_fields(operation.name, operation.fields, operation.request, checked, &problem);
    if (operation.arrange != nullptr) operation.arrange(checked, problem);
  }
  operation.check(problem, checked.device);
  DeviceInfo info;
  info.device = checked.device;
  if (operation.parts != nullptr) operation.parts(problem, info);  // each of them is checked, too
  Device device = request.device;
  operation.visit_tensors(problem, set_device, &device);
  return problem;
}

// Operation::check of an op whose check changes nothing.
template <class Problem, void (*kCheck)(const Problem&, Device)>
void check_only(Problem& problem, Device device) {
  kCheck(problem, device);
}

// Fills what `special` leaves out. `kFlops(problem)` counts floating-point operations where flops_per_element does not.
template <class Problem, const auto& kFields, auto kFlops = nullptr>
constexpr Operation<Problem> declared(Operation<Problem> special) {
  special.fields = kFields;
  special.visit_tensors = [](Problem& problem, TensorVisitor visit, void* state) {
    visit_fields(kFields, &problem, visit, state);
  };
  if constexpr (!std::is_null_pointer_v<decltype(kFlops)>) {
    special.cost = [](const Problem& problem) {
      return Cost{.bytes = bytes_of_fields(kFields, &problem), .flops = kFlops(problem)};
    };
  }
  return special;
}

}  // namespace kernel_pytorch::registry
