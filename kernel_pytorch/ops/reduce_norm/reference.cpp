// The reference of reduce_norm: scalar, in double, one element after another.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::reduce_norm {
namespace {

void run(const Norm& problem, int, Context&) {
  double total = 0;
  for (const TensorView& tensor : problem.tensors) {
    for (int64_t i = 0; i < tensor.element_count(); ++i) {
      const double value = load_element(tensor.data, tensor.dtype, i);
      total += value * value;
    }
  }
  store_element(problem.output.data, problem.output.dtype, 0, std::sqrt(total));
}

uint64_t code_version() {
  return hash_text("reduce_norm reference 1");
}

}  // namespace

constinit const registry::Kernel<Norm> kReference{
    .name = "reference", .supports = supports_on_cpu<Norm>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::reduce_norm
