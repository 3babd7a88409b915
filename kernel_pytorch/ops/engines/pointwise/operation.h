// An op of this engine as the registry sees it: an op adds its name and how a problem of its kind is made.
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/engines/pointwise/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::pointwise {

// The operations of a polynomial and an exponential, roughly: what counts is the bytes.
constexpr registry::Operation<ForwardProblem> forward_operation(std::string_view name,
                                                                ForwardProblem (*make)(const registry::ProblemRequest&),
                                                                void (*check)(ForwardProblem&, Device),
                                                                registry::RequestSource shapes) {
  return registry::declared<ForwardProblem, kForwardProblem>({.name = name,
                                                              .kernels = forward_kernels,
                                                              .make = make,
                                                              .check = check,
                                                              .flops_per_element = 20,
                                                              .shapes = shapes});
}
constexpr registry::Operation<BackwardProblem> backward_operation(
    std::string_view name, BackwardProblem (*make)(const registry::ProblemRequest&),
    void (*check)(BackwardProblem&, Device), registry::RequestSource shapes) {
  return registry::declared<BackwardProblem, kBackwardProblem>({.name = name,
                                                                .kernels = backward_kernels,
                                                                .make = make,
                                                                .check = check,
                                                                .flops_per_element = 30,
                                                                .shapes = shapes});
}

}  // namespace kernel_pytorch::pointwise
