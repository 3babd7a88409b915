// The reference of the poolings: scalar, in double, any strides.
#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::mean_pooling {
namespace {

// Calls visit(batch, mean, inner, range, row) for every mean.
void for_each_mean(const Sizes& sizes, const TensorView& offsets, const auto& visit) {
  int64_t row = 0;
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (int64_t mean = 0; mean < sizes.means; ++mean) {
      const Range range = range_of(sizes, offsets, mean);
      for (int64_t inner = 0; inner < sizes.inner; ++inner) visit(batch, inner, range, row++);
    }
  }
}

int64_t offset_of(const TensorView& x, int64_t batch, int64_t token, int64_t inner, int64_t column) {
  return batch * x.strides[0] + token * x.strides[1] + inner * x.strides[2] + column * x.strides[3];
}

void run_forward(const Forward& problem, int, Context&) {
  const Sizes sizes(problem.x, problem.offsets, problem.chunk_size);
  const TensorView& x = problem.x;
  for_each_mean(sizes, problem.offsets, [&](int64_t batch, int64_t inner, Range range, int64_t row) {
    for (int64_t j = 0; j < sizes.columns; ++j) {
      double total = 0;
      for (int64_t token = range.begin; token < range.end; ++token) {
        total += load_element(x.data, x.dtype, offset_of(x, batch, token, inner, j));
      }
      const double mean = range.begin == range.end ? 0 : total / static_cast<double>(range.end - range.begin);
      store_element(problem.output.data, x.dtype, row * sizes.columns + j, mean);
    }
  });
}

void run_backward(const Backward& problem, int, Context&) {
  const Sizes sizes(problem.grad_input, problem.offsets, problem.chunk_size);
  const TensorView& x = problem.grad_input;
  for (int64_t i = 0; i < x.element_count(); ++i) store_element(x.data, x.dtype, i, 0);
  for_each_mean(sizes, problem.offsets, [&](int64_t batch, int64_t inner, Range range, int64_t row) {
    for (int64_t token = range.begin; token < range.end; ++token) {
      for (int64_t j = 0; j < sizes.columns; ++j) {
        const double gradient = load_element(problem.grad_output.data, x.dtype, row * sizes.columns + j);
        store_element(x.data, x.dtype, offset_of(x, batch, token, inner, j),
                      gradient / static_cast<double>(range.end - range.begin));
      }
    }
  });
}

uint64_t code_version() {
  return hash_text("mean_pooling reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::mean_pooling
