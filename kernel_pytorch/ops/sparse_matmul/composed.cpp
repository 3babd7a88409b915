// The weight is decompressed into memory and multiplied by matmul: for devices without sparse matrix instructions of
// ours, and for whatever the other kernels do not take.
#include <utility>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

registry::Support supports(const Product&, const DeviceInfo&) {
  return registry::Support::yes();
}

void run(const Product& problem, int, Context& context) {
  if (problem.output.element_count() == 0) return;
  Context inner = context;  // the choice of this kernel is not its parts'
  inner.kernel_override = {};
  const int64_t n = problem.values.sizes[0], k = problem.x.sizes[1];
  TensorView weight = contiguous_view(nullptr, problem.x.dtype, {n, k}, problem.x.device);
  weight.data = context.scratch->allocate(static_cast<size_t>(weight.byte_count()));
  sparse_compress::decompress({.values = problem.values, .metadata = problem.metadata, .output = weight}, inner);
  std::swap(weight.sizes[0], weight.sizes[1]);
  std::swap(weight.strides[0], weight.strides[1]);
  matmul::multiply(
      {.a = problem.x, .b = weight, .bias = problem.bias, .activation = problem.activation, .output = problem.output},
      inner);
}

uint64_t code_version() {
  return hash_text("sparse_matmul composed 1");
}

}  // namespace

constinit const registry::Kernel<Product> kComposed{
    .name = "composed", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::sparse_matmul
