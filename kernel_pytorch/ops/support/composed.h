// An op that is made of other ops: its list has the composition, whose parts choose their own kernels, and the same
// with every part by its reference.
#pragma once

#include <span>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch {

// kTakesDouble: its parts have kernels of fp64 on a GPU.
template <class Problem, void (*kCompose)(const Problem&, Context&), bool kTakesDouble = false>
std::span<const registry::Kernel<Problem>> composed_kernels() {
  using Kernel = registry::Kernel<Problem>;
  static const Kernel kKernels[] = {
      {.name = "composed",
       .supports =
           [](const Problem& problem, const DeviceInfo& device) {
             const bool is_wide = !kTakesDouble && !device.is_cpu() && problem.x.dtype == DType::kFloat64;
             return registry::Support::unless(is_wide ? "its parts take fp64 on the CPU only" : nullptr);
           },
       .run =
           [](const Problem& problem, int, Context& context) {
             Context inner = context;  // the choice of this kernel is not its parts'
             inner.kernel_override = {};
             kCompose(problem, inner);
           },
       .source_hash = [] { return hash_text("composed 1"); }},
      {.name = "reference",
       .supports = supports_on_cpu<Problem>,
       .run =
           [](const Problem& problem, int, Context& context) {
             Context inner = context;
             inner.kernel_override = "reference";
             kCompose(problem, inner);
           },
       .source_hash = [] { return hash_text("composed references 1"); }},
  };
  return kKernels;
}

}  // namespace kernel_pytorch
