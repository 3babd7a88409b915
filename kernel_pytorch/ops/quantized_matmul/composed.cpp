// Rows of the weight are decoded into memory, a panel at a time, and multiplied by matmul: for many rows of x, where
// decoding is a small part, and for whatever the other kernels do not take.
#include <algorithm>
#include <utility>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

registry::Support supports(const Product&, const DeviceInfo&) {
  return registry::Support::yes();
}

TensorView rows_of(const TensorView& view, int64_t first, int64_t count) {
  if (!view.is_present()) return view;
  TensorView part = view;
  part.sizes[0] = count;
  part.data = view.as<char>() + first * view.strides[0] * size_of(view.dtype);
  return part;
}

void run(const Product& problem, int, Context& context) {
  const int64_t n = problem.codes.sizes[0], k = problem.x.sizes[1];
  if (problem.output.element_count() == 0) return;
  Context inner = context;  // the choice of this kernel is not its parts'
  inner.kernel_override = {};
  // On the CPU a panel stays in the second cache; on a GPU it is large enough to fill the device.
  const bool is_cpu = problem.x.device.kind == DeviceKind::kCpu;
  const int64_t elements = int64_t{1} << (is_cpu ? 19 : 26);
  const int64_t panel = std::min(n, std::max<int64_t>(elements / std::max<int64_t>(k, 1) / 128 * 128, 128));
  TensorView weight = contiguous_view(nullptr, problem.x.dtype, {panel, k}, problem.x.device);
  weight.data = context.scratch->allocate(static_cast<size_t>(weight.byte_count()));
  // A GPU's tensor_scale is not known here, and is rounded into the weight.
  const bool has_alpha = is_cpu && problem.tensor_scale.is_present();
  const double alpha = has_alpha ? *problem.tensor_scale.as<const float>() : 1;
  for (int64_t first = 0; first < n; first += panel) {
    const int64_t count = std::min(panel, n - first);
    weight.sizes[0] = count;
    group_quantize::dequantize({.codes = rows_of(problem.codes, first, count),
                                .scales = rows_of(problem.scales, first, count),
                                .zeros = rows_of(problem.zeros, first, count),
                                .tensor_scale = has_alpha ? TensorView{} : problem.tensor_scale,
                                .format = problem.format,
                                .group = problem.group,
                                .columns = k,
                                .output = weight},
                               inner);
    TensorView across = weight, output = problem.output;
    std::swap(across.sizes[0], across.sizes[1]);
    std::swap(across.strides[0], across.strides[1]);
    output.sizes[1] = count;
    output.data = output.as<char>() + first * size_of(output.dtype);
    matmul::multiply({.a = problem.x,
                      .b = across,
                      .alpha = alpha,
                      .bias = rows_of(problem.bias, first, count),
                      .activation = problem.activation,
                      .output = output},
                     inner);
  }
}

uint64_t code_version() {
  return hash_text("quantized_matmul composed 1");
}

}  // namespace

constinit const registry::Kernel<Product> kComposed{
    .name = "composed", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantized_matmul
