// The reference of the scaled grouped product: one element after another, in double.
#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/scaled_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

double value_of(const Product& problem, int64_t group, int64_t row, int64_t column) {
  const TensorView &a = problem.a, &b = problem.b, &scale_a = problem.scale_a, &scale_b = problem.scale_b;
  const int64_t line = problem.gather.is_present() ? problem.gather.as<const int32_t>()[row] : row;
  double total =
      problem.bias.is_present() ? load_element(problem.bias.data, problem.bias.dtype, group * b.sizes[1] + column) : 0;
  for (int64_t i = 0; i < a.sizes[1]; ++i) {
    const int64_t block = i / kBlock;
    const double of_a = load_element(a.data, a.dtype, line * a.strides[0] + i);
    const double of_b = load_element(b.data, b.dtype, group * b.strides[0] + column * b.strides[1] + i);
    const int64_t at_a = line * scale_a.strides[0] + block * scale_a.strides[1];
    const int64_t at_b = group * scale_b.strides[0] + column / rows_of_b_scale(problem) * scale_b.strides[1] +
                         block * scale_b.strides[2];
    total += of_a * scale_a.as<const float>()[at_a] * of_b * scale_b.as<const float>()[at_b];
  }
  return total;
}

void run(const Product& problem, int, Context&) {
  const TensorView& output = problem.output;
  int64_t row = 0;
  for (int64_t group = 0; group < problem.b.sizes[0]; ++group) {
    for (; row < range_of(problem.offsets, group).end; ++row) {
      for (int64_t j = 0; j < output.sizes[1]; ++j) {
        store_element(output.data, output.dtype, row * output.strides[0] + j, value_of(problem, group, row, j));
      }
    }
  }
  for (; row < output.sizes[0]; ++row) {
    for (int64_t j = 0; j < output.sizes[1]; ++j) {
      store_element(output.data, output.dtype, row * output.strides[0] + j, 0);
    }
  }
}

uint64_t code_version() {
  return hash_text("scaled_grouped_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::scaled_grouped_matmul
