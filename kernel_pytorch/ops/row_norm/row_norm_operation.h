// An op of this engine as the registry sees it: what the two norms share is filled in here, a norm adds its name, its
// list of kernels and how a problem of its kind is made.
#pragma once

#include <span>
#include <string_view>

#include "kernel_pytorch/ops/row_norm/row_norm.h"
#include "kernel_pytorch/ops/row_norm/row_norm_shapes.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::row_norm {

template <class Problem>
registry::Filling filling(const Problem&, std::string_view tensor) {
  return {.content = tensor == "rstd" ? registry::Content::kPositive : registry::Content::kNormal};
}

template <class Problem>
constexpr registry::Operation<Problem> make_operation(std::string_view name,
                                                      std::span<const registry::Kernel<Problem>> (*kernels)(),
                                                      Problem (*make)(const registry::ProblemRequest&)) {
  return {.name = name,
          .kernels = kernels,
          .describe = describe,
          .visit_tensors = visit_tensors,
          .filling = filling,
          .make = make,
          .shrink = shrink,
          .cost = cost,
          .shapes = shapes};
}

}  // namespace kernel_pytorch::row_norm
