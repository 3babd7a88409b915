// An op of this engine as the registry sees it: an op adds its name and how a problem of its kind is made.
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/pointwise/pointwise.h"
#include "kernel_pytorch/ops/pointwise/pointwise_shapes.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::pointwise {

template <class Problem>
registry::Filling filling(const Problem&, std::string_view tensor) {
  return {.content = tensor == "seed" ? registry::Content::kSeeds : registry::Content::kNormal};
}

constexpr registry::Operation<ForwardProblem> forward_operation(std::string_view name,
                                                                ForwardProblem (*make)(const registry::ProblemRequest&),
                                                                std::vector<registry::ProblemRequest> (*shapes)()) {
  return {.name = name,
          .kernels = forward_kernels,
          .describe = describe,
          .visit_tensors = visit_tensors,
          .filling = filling,
          .make = make,
          .shrink = shrink,
          .cost = cost,
          .shapes = shapes};
}

constexpr registry::Operation<BackwardProblem> backward_operation(
    std::string_view name, BackwardProblem (*make)(const registry::ProblemRequest&),
    std::vector<registry::ProblemRequest> (*shapes)()) {
  return {.name = name,
          .kernels = backward_kernels,
          .describe = describe,
          .visit_tensors = visit_tensors,
          .filling = filling,
          .make = make,
          .shrink = shrink,
          .cost = cost,
          .shapes = shapes};
}

}  // namespace kernel_pytorch::pointwise
