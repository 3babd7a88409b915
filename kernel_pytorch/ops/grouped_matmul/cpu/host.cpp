// The CPU kernels: group by group the product of matmul, which packs, threads and chooses its own kernels (AMX, few
// rows). Rows that are gathered are copied next to each other first; sums of a gate pass through fp32 rows, which the
// gate reads from the caches.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/grouped_matmul/cpu/rows.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

constexpr int64_t kGateRows = 16;  // of a task

registry::Support supports_multiply(const Product& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.a.dtype, device));
}
registry::Support supports_weight(const WeightGradient& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.a.dtype, device));
}
registry::Support supports_sums(const Sums& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.x.dtype, device));
}

char* row_at(const TensorView& view, int64_t row) {
  return view.as<char>() + row * view.strides[0] * size_of(view.dtype);
}

// Rows [begin, end) of a matrix.
TensorView rows_between(TensorView view, const Range& range) {
  if (!view.is_present()) return view;
  view.data = row_at(view, range.begin);
  view.sizes[0] = range.count();
  return view;
}
TensorView matrix_at(const TensorView& view, int64_t index) {
  TensorView one = view;
  one.rank = 2;
  one.data = view.as<char>() + index * view.strides[0] * size_of(view.dtype);
  one.sizes = {view.sizes[1], view.sizes[2]};
  one.strides = {view.strides[1], view.strides[2]};
  return one;
}
TensorView transposed(TensorView view) {
  std::swap(view.sizes[0], view.sizes[1]);
  std::swap(view.strides[0], view.strides[1]);
  return view;
}
TensorView scratch_rows(Context& context, DType dtype, int64_t rows, int64_t columns) {
  TensorView view = contiguous_view(nullptr, dtype, {rows, columns}, context.device());
  view.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(view.byte_count(), 1)));
  return view;
}

// The rows of a group, as they lie or copied next to each other.
TensorView group_rows(const TensorView& source, const TensorView& gather, const Range& range, Context& context) {
  if (!gather.is_present()) return rows_between(source, range);
  const TensorView rows = scratch_rows(context, source.dtype, range.count(), source.sizes[1]);
  const int32_t* lines = gather.as<const int32_t>() + range.begin;
  const auto bytes = static_cast<size_t>(source.sizes[1] * size_of(source.dtype));
  parallel_for(context.threads, (range.count() + kGateRows - 1) / kGateRows, [&](int64_t task) {
    for (int64_t i = task * kGateRows; i < std::min(range.count(), (task + 1) * kGateRows); ++i) {
      std::memcpy(row_at(rows, i), row_at(source, lines[i]), bytes);
    }
  });
  return rows;
}

Context parts_context(const Context& context) {
  Context inner = context;  // the choice of this kernel is not its products'
  inner.kernel_override = {};
  return inner;
}

RowMemory memory_of(const TensorView& view, int64_t row) {
  if (!view.is_present()) return {};
  return {row_at(view, row), view.dtype, view.strides[0]};
}

void gate(const Product& problem, const TensorView& sums, const Range& range, Context& context) {
  const auto gate_rows_of_level = KP_AT_CPU_LEVEL(context.info->cpu.isa, gate_rows);
  parallel_for(context.threads, (range.count() + kGateRows - 1) / kGateRows, [&](int64_t task) {
    const int64_t first = task * kGateRows;
    gate_rows_of_level({.sums = sums.as<const float>() + first * sums.sizes[1],
                        .rows = std::min(kGateRows, range.count() - first),
                        .columns = sums.sizes[1],
                        .is_packed = problem.form == Form::kPackedGated,
                        .activation = problem.activation,
                        .limit = static_cast<float>(problem.limit),
                        .slope = static_cast<float>(problem.slope),
                        .output = memory_of(problem.output, range.begin + first),
                        .preactivation = memory_of(problem.preactivation, range.begin + first)});
  });
}

void clear_rows(const TensorView& view, int64_t first) {
  for (int64_t row = first; view.is_present() && row < view.sizes[0]; ++row) {
    std::memset(row_at(view, row), 0, static_cast<size_t>(view.sizes[1] * size_of(view.dtype)));
  }
}

// A group's bias in the type of the sums' rows, or in fp32.
TensorView bias_of(const Product& problem, int64_t group, DType sums, Context& context) {
  const int64_t n = problem.b.sizes[2];
  const TensorView own = contiguous_view(row_at(problem.bias, group), problem.bias.dtype, {n});
  if (own.dtype == sums || own.dtype == DType::kFloat32) return own;
  TensorView wide = scratch_rows(context, DType::kFloat32, 1, n);
  wide.rank = 1;
  wide.sizes = {n};
  wide.strides = {1};
  for (int64_t j = 0; j < n; ++j) {
    wide.as<float>()[j] = static_cast<float>(load_element(own.data, own.dtype, j));
  }
  return wide;
}

void run_multiply(const Product& problem, int, Context& context) {
  Context inner = parts_context(context);
  int64_t end = 0;
  for (int64_t group = 0; group < problem.b.sizes[0]; ++group) {
    const Range range = range_of(problem.offsets, group);
    end = range.end;
    if (range.count() == 0) continue;
    const ScratchScope scope(inner.scratch);
    matmul::Product product{.a = group_rows(problem.a, problem.gather, range, inner), .b = matrix_at(problem.b, group)};
    const DType sums = problem.form == Form::kPlain ? problem.output.dtype : DType::kFloat32;
    if (problem.bias.is_present()) product.bias = bias_of(problem, group, sums, inner);
    if (problem.form == Form::kPlain) {
      product.activation = problem.activation;
      product.output = rows_between(problem.output, range);
      product.preactivation = rows_between(problem.preactivation, range);
      matmul::multiply(product, inner);
    } else {
      product.output = scratch_rows(inner, sums, range.count(), problem.b.sizes[2]);
      matmul::multiply(product, inner);
      gate(problem, product.output, range, inner);
    }
  }
  clear_rows(problem.output, end);
  clear_rows(problem.preactivation, end);
}

void run_weight(const WeightGradient& problem, int, Context& context) {
  Context inner = parts_context(context);
  for (int64_t group = 0; group < problem.output.sizes[0]; ++group) {
    const Range range = range_of(problem.offsets, group);
    const ScratchScope scope(inner.scratch);
    const TensorView a = group_rows(problem.a, problem.gather_a, range, inner);
    const TensorView b = group_rows(problem.b, problem.gather_b, range, inner);
    const TensorView output = matrix_at(problem.output, group);
    if (output.strides[1] == 1) {
      matmul::multiply({.a = transposed(a), .b = b, .output = output}, inner);
    } else {  // its transpose is row-major
      matmul::multiply({.a = transposed(b), .b = a, .output = transposed(output)}, inner);
    }
  }
}

void run_sums(const Sums& problem, int, Context& context) {
  constexpr int64_t kStrip = 512;
  const int64_t columns = problem.x.sizes[1], strips = (columns + kStrip - 1) / kStrip;
  const auto sum_rows_of_level = KP_AT_CPU_LEVEL(context.info->cpu.isa, sum_rows);
  const int64_t bytes = size_of(problem.x.dtype);
  parallel_for(context.threads, problem.output.sizes[0] * strips, [&](int64_t task) {
    const int64_t group = task / strips, column = task % strips * kStrip, count = std::min(kStrip, columns - column);
    const Range range = range_of(problem.offsets, group);
    float totals[kStrip];
    const int32_t* lines = problem.gather.as<const int32_t>();
    const float* factors = problem.factors.as<const float>();
    RowMemory from = memory_of(problem.x, lines == nullptr ? range.begin : 0);
    from.data = static_cast<char*>(from.data) + column * bytes;
    sum_rows_of_level({.from = from,
                       .lines = lines == nullptr ? nullptr : lines + range.begin,
                       .factors = factors == nullptr ? nullptr : factors + range.begin,
                       .rows = range.count(),
                       .columns = count,
                       .totals = totals});
    for (int64_t j = 0; j < count; ++j) {
      store_element(problem.output.data, problem.output.dtype, group * columns + column + j, totals[j]);
    }
  });
}

uint64_t code_version() {
  return hash_text("grouped_matmul cpu 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports_multiply, .run = run_multiply, .source_hash = code_version};
constinit const registry::Kernel<WeightGradient> kWeightCpu{
    .name = "cpu", .supports = supports_weight, .run = run_weight, .source_hash = code_version};
constinit const registry::Kernel<Sums> kSumsCpu{
    .name = "cpu", .supports = supports_sums, .run = run_sums, .source_hash = code_version};

}  // namespace kernel_pytorch::grouped_matmul
