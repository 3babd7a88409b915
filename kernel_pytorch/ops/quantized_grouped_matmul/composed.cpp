// The weights of all groups decoded into memory, and a product of groups: for whatever the other kernels do not take on
// a GPU, whose offsets the host does not know.
#include <algorithm>
#include <utility>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

registry::Support supports_composed(const Product&, const DeviceInfo&) {
  return registry::Support::yes();
}

void run_composed(const Product& problem, int, Context& context) {
  if (problem.output.element_count() == 0) return;
  Context inner = context;  // the choice of this kernel is not its parts'
  inner.kernel_override = {};
  const int64_t groups = groups_of(problem), n = columns_of(problem), k = problem.x.sizes[1];
  TensorView weight = contiguous_view(nullptr, problem.x.dtype, {groups * n, k}, problem.x.device);
  weight.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(weight.byte_count(), 1)));
  group_quantize::dequantize({.codes = problem.codes,
                              .scales = problem.scales,
                              .zeros = problem.zeros,
                              .tensor_scale = problem.tensor_scale,
                              .format = problem.format,
                              .group = problem.group,
                              .columns = k,
                              .output = weight},
                             inner);
  TensorView matrices = contiguous_view(weight.data, weight.dtype, {groups, n, k}, weight.device);
  std::swap(matrices.sizes[1], matrices.sizes[2]);
  std::swap(matrices.strides[1], matrices.strides[2]);
  grouped_matmul::multiply({.a = problem.x,
                            .b = matrices,
                            .offsets = problem.offsets,
                            .gather = problem.gather,
                            .bias = problem.bias,
                            .activation = problem.activation,
                            .rows = problem.output.sizes[0],
                            .output = problem.output},
                           inner);
}

uint64_t composed_version() {
  return hash_text("quantized_grouped_matmul composed 1");
}

}  // namespace

constinit const registry::Kernel<Product> kComposed{
    .name = "composed", .supports = supports_composed, .run = run_composed, .source_hash = composed_version};

}  // namespace kernel_pytorch::quantized_grouped_matmul
