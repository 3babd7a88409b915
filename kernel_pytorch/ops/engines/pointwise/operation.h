// An op of this engine as the registry sees it: an op adds its name and how a problem of its kind is made.
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/engines/pointwise/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::pointwise {

template <class Problem>
registry::Filling filling(const Problem&, std::string_view tensor) {
  return {.content = tensor == "seed" ? registry::Content::kSeeds : registry::Content::kNormal};
}

// The operations of a polynomial and an exponential, roughly: what counts is the bytes.
inline int64_t forward_flops(const ForwardProblem& problem) {
  return 20 * problem.gate.element_count();
}
inline int64_t backward_flops(const BackwardProblem& problem) {
  return 30 * problem.gate.element_count();
}

constexpr registry::Operation<ForwardProblem> forward_operation(std::string_view name,
                                                                ForwardProblem (*make)(const registry::ProblemRequest&),
                                                                void (*check)(ForwardProblem&, Device),
                                                                std::vector<registry::ProblemRequest> (*shapes)()) {
  return registry::declared<ForwardProblem, kForwardProblem, forward_flops>(
      {.name = name, .kernels = forward_kernels, .filling = filling, .make = make, .check = check, .shapes = shapes});
}

constexpr registry::Operation<BackwardProblem> backward_operation(
    std::string_view name, BackwardProblem (*make)(const registry::ProblemRequest&),
    void (*check)(BackwardProblem&, Device), std::vector<registry::ProblemRequest> (*shapes)()) {
  return registry::declared<BackwardProblem, kBackwardProblem, backward_flops>(
      {.name = name, .kernels = backward_kernels, .filling = filling, .make = make, .check = check, .shapes = shapes});
}

}  // namespace kernel_pytorch::pointwise
