// What an Operation derives from the fields of its problem: visiting tensors, the tuning key, problems made of requests
// and smaller ones.
//
//   constinit const Operation<Forward> kForward =
//       declared<Forward, kForwardFields, check, flops>({.name = "rms_norm_forward", .kernels = forward_kernels});
#pragma once

#include <type_traits>

#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

void visit_fields(const Fields& fields, void* problem, TensorVisitor visit, void* state);
// Every part of the key is in it always, absent ones as such, so that two problems never share a key by leaving
// different fields out.
void describe_fields(const Fields& fields, const void* problem, tuning::KeyBuilder& key);
// A request's shape is that of the leading input. Options: NAME=0|1 for an optional input, NAME=VALUE for an option,
// NAME_dtype=TYPE for a tensor whose type no rule gives; outputs are made, those that depend on an input only with it.
void make_fields(const Fields& fields, const ProblemRequest& request, void* problem);
// The part of make_fields that is about options alone, for an op that makes its tensors itself; what requests may say
// of them.
void make_options(const Fields& fields, const ProblemRequest& request, void* problem);
std::vector<std::string_view> option_names(const Fields& fields);
void move_fields(const Fields& fields, void* problem, Device device);
// Keeps the first rows of tensors with leading dimensions, as many as have `elements` elements of the leading input.
void shrink_fields(const Fields& fields, void* problem, int64_t elements);

int64_t bytes_of_fields(const Fields& fields, const void* problem);

// Fills what `special` leaves out. `kCheck(problem, device)` is the op's own check: trials and the command line pass it
// like every call; without one, `special` has its own `make`. `kFlops(problem)` counts floating-point operations, the
// bytes are those of all tensors; without it, `special` has its own `cost`.
template <class Problem, const auto& kFields, auto kCheck = nullptr, auto kFlops = nullptr>
constexpr Operation<Problem> declared(Operation<Problem> special) {
  if (special.describe == nullptr) {
    special.describe = [](const Problem& problem, tuning::KeyBuilder& key) { describe_fields(kFields, &problem, key); };
  }
  special.visit_tensors = [](Problem& problem, TensorVisitor visit, void* state) {
    visit_fields(kFields, &problem, visit, state);
  };
  if constexpr (!std::is_null_pointer_v<decltype(kCheck)>) {
    special.make = [](const ProblemRequest& request) {
      // Checked as on the CPU, then moved: what a device lacks is for `supports` to say, kernel by kernel.
      ProblemRequest on_cpu = request;
      on_cpu.device = Device{};
      Problem problem{};
      make_fields(kFields, on_cpu, &problem);
      kCheck(problem, on_cpu.device);
      move_fields(kFields, &problem, request.device);
      return problem;
    };
  }
  if (special.shrink == nullptr) {
    special.shrink = [](const Problem& problem, int64_t elements) {
      Problem small = problem;
      shrink_fields(kFields, &small, elements);
      return small;
    };
  }
  if constexpr (!std::is_null_pointer_v<decltype(kFlops)>) {
    special.cost = [](const Problem& problem) {
      return Cost{.bytes = bytes_of_fields(kFields, &problem), .flops = kFlops(problem)};
    };
  }
  return special;
}

}  // namespace kernel_pytorch::registry
