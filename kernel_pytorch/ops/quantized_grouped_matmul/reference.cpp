// The reference: a group after another, its weight decoded by group_dequantize's reference, sums in double.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

// All weights without tensor_scale, in x's type.
TensorView decoded(const Product& problem, Context& context) {
  Context inner = context;
  inner.kernel_override = "reference";
  TensorView weight = contiguous_view(nullptr, problem.x.dtype, {problem.codes.sizes[0], problem.x.sizes[1]});
  weight.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(weight.byte_count(), 1)));
  group_quantize::dequantize({.codes = problem.codes,
                              .scales = problem.scales,
                              .zeros = problem.zeros,
                              .format = problem.format,
                              .group = problem.group,
                              .columns = problem.x.sizes[1],
                              .output = weight},
                             inner);
  return weight;
}

void run(const Product& problem, int, Context& context) {
  const int64_t n = columns_of(problem), k = problem.x.sizes[1];
  const double tensor_scale = problem.tensor_scale.is_present() ? *problem.tensor_scale.as<const float>() : 1;
  const TensorView weight = decoded(problem, context);
  int64_t end = 0;
  for (int64_t group = 0; group < groups_of(problem); ++group) {
    const Range range = range_of(problem, group);
    end = range.end;
    for (int64_t row = range.begin; row < range.end; ++row) {
      const int64_t line = problem.gather.is_present() ? problem.gather.as<const int32_t>()[row] : row;
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) {
          sum += load_element(problem.x.data, problem.x.dtype, line * problem.x.strides[0] + i) *
                 load_element(weight.data, weight.dtype, (group * n + j) * k + i);
        }
        sum *= tensor_scale;
        if (problem.bias.is_present()) sum += load_element(problem.bias.data, problem.bias.dtype, group * n + j);
        store_element(problem.output.data, problem.output.dtype, row * problem.output.strides[0] + j,
                      pointwise::evaluate(problem.activation, sum).value);
      }
    }
  }
  for (int64_t row = end; row < problem.output.sizes[0]; ++row) {
    for (int64_t j = 0; j < n; ++j) {
      store_element(problem.output.data, problem.output.dtype, row * problem.output.strides[0] + j, 0);
    }
  }
}

uint64_t code_version() {
  return hash_text("quantized_grouped_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantized_grouped_matmul
