// The CPU kernel: group by group the product of scaled_matmul. Rows that are gathered, and their scales, are copied
// next to each other first.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/scaled_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/scaled_matmul/scaled_matmul.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

char* row_at(const TensorView& view, int64_t row) {
  return view.as<char>() + row * view.strides[0] * size_of(view.dtype);
}
TensorView scratch_rows(Context& context, DType dtype, int64_t rows, int64_t columns) {
  TensorView view = contiguous_view(nullptr, dtype, {rows, columns}, context.device());
  view.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(view.byte_count(), 1)));
  return view;
}
TensorView rows_between(TensorView view, const Range& range) {
  view.data = row_at(view, range.begin);
  view.sizes[0] = range.count();
  return view;
}

TensorView codes_of(const Product& problem, const Range& range, Context& context) {
  if (!problem.gather.is_present()) return rows_between(problem.a, range);
  const TensorView rows = scratch_rows(context, problem.a.dtype, range.count(), problem.a.sizes[1]);
  const int32_t* lines = problem.gather.as<const int32_t>() + range.begin;
  for (int64_t i = 0; i < range.count(); ++i) {
    std::memcpy(row_at(rows, i), row_at(problem.a, lines[i]), static_cast<size_t>(problem.a.sizes[1]));
  }
  return rows;
}
TensorView scales_of(const Product& problem, const Range& range, Context& context) {
  const TensorView& scale = problem.scale_a;
  if (scale.sizes[0] == 1) return scale;
  if (!problem.gather.is_present()) return rows_between(scale, range);
  const TensorView rows = scratch_rows(context, DType::kFloat32, range.count(), scale.sizes[1]);
  const int32_t* lines = problem.gather.as<const int32_t>() + range.begin;
  for (int64_t i = 0; i < range.count(); ++i) {
    for (int64_t block = 0; block < scale.sizes[1]; ++block) {
      rows.as<float>()[i * scale.sizes[1] + block] =
          scale.as<const float>()[lines[i] * scale.strides[0] + block * scale.strides[1]];
    }
  }
  return rows;
}
TensorView matrix_at(const TensorView& view, int64_t index) {
  TensorView one = view;
  one.rank = 2;
  one.data = view.as<char>() + index * view.strides[0] * size_of(view.dtype);
  one.sizes = {view.sizes[1], view.sizes[2]};
  one.strides = {view.strides[1], view.strides[2]};
  return one;
}

void run(const Product& problem, int, Context& context) {
  Context inner = context;  // the choice of this kernel is not its products'
  inner.kernel_override = {};
  int64_t end = 0;
  for (int64_t group = 0; group < problem.b.sizes[0]; ++group) {
    const Range range = range_of(problem.offsets, group);
    end = range.end;
    if (range.count() == 0) continue;
    const ScratchScope scope(inner.scratch);
    scaled_matmul::Product product{.a = codes_of(problem, range, inner),
                                   .b = matrix_at(problem.b, group),
                                   .scale_a = scales_of(problem, range, inner),
                                   .scale_b = matrix_at(problem.scale_b, group),
                                   .accurate = problem.accurate,
                                   .output = rows_between(problem.output, range)};
    if (problem.bias.is_present()) {
      product.bias = contiguous_view(row_at(problem.bias, group), problem.bias.dtype, {problem.b.sizes[1]});
    }
    scaled_matmul::multiply(product, inner);
  }
  for (int64_t row = end; row < rows_of(problem); ++row) {
    std::memset(row_at(problem.output, row), 0,
                static_cast<size_t>(problem.output.sizes[1] * size_of(problem.output.dtype)));
  }
}

uint64_t code_version() {
  return hash_text("scaled_grouped_matmul cpu 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::scaled_grouped_matmul
