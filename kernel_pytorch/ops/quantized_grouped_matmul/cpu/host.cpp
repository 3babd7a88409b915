// The CPU kernel: group by group the product of quantized_matmul, which threads and chooses its own kernels (few rows
// are multiplied by codes, many by a decoded panel). Rows that are gathered are copied next to each other first.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/quantized_matmul/quantized_matmul.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

char* line_at(const TensorView& view, int64_t row) {
  return view.as<char>() + row * view.strides[0] * size_of(view.dtype);
}

TensorView lines_of(TensorView view, int64_t first, int64_t count) {
  if (!view.is_present()) return view;
  view.data = line_at(view, first);
  view.sizes[0] = count;
  return view;
}

// The rows of a group, as they lie or copied next to each other.
TensorView rows_of_group(const Product& problem, const Range& range, Context& context) {
  if (!problem.gather.is_present()) return lines_of(problem.x, range.begin, range.count());
  TensorView rows = contiguous_view(nullptr, problem.x.dtype, {range.count(), problem.x.sizes[1]});
  rows.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(rows.byte_count(), 1)));
  const auto bytes = static_cast<size_t>(problem.x.sizes[1] * size_of(problem.x.dtype));
  for (int64_t i = 0; i < range.count() && bytes > 0; ++i) {
    std::memcpy(line_at(rows, i), line_at(problem.x, problem.gather.as<const int32_t>()[range.begin + i]), bytes);
  }
  return rows;
}

void run_cpu(const Product& problem, int, Context& context) {
  Context inner = context;  // the choice of this kernel is not its products'
  inner.kernel_override = {};
  const int64_t n = columns_of(problem);
  int64_t end = 0;
  for (int64_t group = 0; group < groups_of(problem); ++group) {
    const Range range = range_of(problem, group);
    end = range.end;
    if (range.count() == 0 || n == 0) continue;
    const ScratchScope scope(inner.scratch);
    TensorView bias = problem.bias;
    if (bias.is_present()) bias = contiguous_view(line_at(problem.bias, group), bias.dtype, {n});
    quantized_matmul::multiply({.x = rows_of_group(problem, range, inner),
                                .codes = lines_of(problem.codes, group * n, n),
                                .scales = lines_of(problem.scales, group * n, n),
                                .zeros = lines_of(problem.zeros, group * n, n),
                                .tensor_scale = problem.tensor_scale,
                                .bias = bias,
                                .format = problem.format,
                                .group = problem.group,
                                .activation = problem.activation,
                                .output = lines_of(problem.output, range.begin, range.count())},
                               inner);
  }
  for (int64_t row = end; row < problem.output.sizes[0]; ++row) {
    std::memset(line_at(problem.output, row), 0, static_cast<size_t>(n * size_of(problem.output.dtype)));
  }
}

uint64_t cpu_version() {
  return hash_text("quantized_grouped_matmul cpu 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports_on_cpu<Product>, .run = run_cpu, .source_hash = cpu_version};

}  // namespace kernel_pytorch::quantized_grouped_matmul
