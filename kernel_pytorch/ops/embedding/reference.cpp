// The reference of embedding: scalar, sums in double, one row after another, any strides.
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::embedding {
namespace {

void run_forward(const Forward& problem, int, Context&) {
  const TensorView& weight = problem.weight;
  const int64_t columns = columns_of(weight);
  for (int64_t i = 0; i < problem.indices.element_count(); ++i) {
    const int64_t row = checked_index(problem.indices, i, weight.sizes[0]);
    for (int64_t j = 0; j < columns; ++j) {
      store_element(problem.output.data, weight.dtype, i * columns + j,
                    load_element(weight.data, weight.dtype, row * weight.strides[0] + j * weight.strides[1]));
    }
  }
}

void run_backward(const Backward& problem, int, Context&) {
  const TensorView& gradient = problem.grad_output;
  const int64_t rows = problem.grad_weight.sizes[0], columns = columns_of(problem.grad_weight);
  std::vector<double> sums(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < problem.indices.element_count(); ++i) {
    const int64_t row = checked_index(problem.indices, i, rows);
    if (row == problem.padding_index) continue;
    const int64_t start = row_offset(gradient, i);
    for (int64_t j = 0; j < columns; ++j) {
      sums[row * columns + j] += load_element(gradient.data, gradient.dtype, start + j * gradient.stride(-1));
    }
  }
  for (int64_t i = 0; i < rows * columns; ++i) {
    store_element(problem.grad_weight.data, problem.grad_weight.dtype, i, sums[i]);
  }
}

uint64_t code_version() {
  return hash_text("embedding reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::embedding
