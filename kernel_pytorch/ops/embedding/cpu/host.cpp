// The host side of the CPU kernels. The backward sorts the positions by index first, stably, by counting: each row of
// the table then has its positions side by side and is written once, by one thread.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/embedding/cpu/rows.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::embedding {
namespace {

constexpr const char* kManyLeading = "rows are not evenly spaced in memory: their leading dimensions do not merge";

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(strided_obstacle({&problem.weight}));
}

registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  if (problem.grad_output.rank != 2) return registry::Support::no(kManyLeading);
  return registry::Support::unless(strided_obstacle({&problem.grad_output}));
}

bool is_streamable(const TensorView& rows) {
  return rows.byte_count() >= kStreamFromBytes && rows_are_aligned(rows);
}

void run_forward(const Forward& problem, int, Context& context) {
  if (problem.output.element_count() == 0) return;
  const int64_t positions = problem.indices.element_count(), columns = columns_of(problem.weight);
  const int64_t element_bytes = size_of(problem.weight.dtype), row_bytes = columns * element_bytes;
  const auto copy_row = KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels).copy;
  const bool is_streamed = is_streamable(problem.output);
  const int64_t rows_per_task = std::max<int64_t>(kTaskBytes / std::max<int64_t>(row_bytes, 64), 1);
  parallel_for(context.threads, (positions + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = std::min(positions, (task + 1) * rows_per_task);
    const auto row_at = [&](int64_t i) {
      const int64_t row = checked_index(problem.indices, i, problem.weight.sizes[0]);
      return problem.weight.as<const char>() + row * problem.weight.strides[0] * element_bytes;
    };
    const char* from = row_at(task * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) {
      const char* next = i + 1 < end ? row_at(i + 1) : nullptr;
      char* to = problem.output.as<char>() + i * row_bytes;
      if (is_streamed) {
        copy_row({.to = to, .from = from, .next = next, .bytes = row_bytes});
      } else {
        std::memcpy(to, from, static_cast<size_t>(row_bytes));
      }
      from = next;
    }
  });
}

// Positions by row: those of row r are positions[starts[r]] up to positions[starts[r + 1]], ascending.
struct Sorted {
  int32_t* starts;  // [rows + 2]
  int32_t* positions;
};

Sorted sort_positions(const Backward& problem, Context& context) {
  const int64_t rows = problem.grad_weight.sizes[0], count = problem.indices.element_count();
  Sorted sorted{static_cast<int32_t*>(context.scratch->allocate(static_cast<size_t>(rows + 2) * sizeof(int32_t))),
                static_cast<int32_t*>(context.scratch->allocate(static_cast<size_t>(count + 1) * sizeof(int32_t)))};
  std::fill_n(sorted.starts, rows + 2, 0);
  const auto for_each = [&](const auto& visit) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = checked_index(problem.indices, i, rows);
      if (row != problem.padding_index) visit(row, i);
    }
  };
  for_each([&](int64_t row, int64_t) { ++sorted.starts[row + 2]; });
  for (int64_t row = 0; row < rows; ++row) sorted.starts[row + 2] += sorted.starts[row + 1];
  // Placing moves the start of each row to that of the next: one array serves both.
  for_each([&](int64_t row, int64_t i) { sorted.positions[sorted.starts[row + 1]++] = static_cast<int32_t>(i); });
  return sorted;
}

void run_backward(const Backward& problem, int, Context& context) {
  if (problem.grad_weight.element_count() == 0) return;
  const int64_t rows = problem.grad_weight.sizes[0], columns = columns_of(problem.grad_weight);
  const int64_t row_bytes = columns * size_of(problem.grad_weight.dtype);
  const Sorted sorted = sort_positions(problem, context);
  const bool streams = is_streamable(problem.grad_weight);
  const auto sum =
      KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels).sum_rows[static_cast<int>(problem.grad_weight.dtype)];
  const int64_t rows_per_task = std::max<int64_t>(kTaskBytes / std::max<int64_t>(row_bytes, 64), 1);
  parallel_for(context.threads, (rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) {
      char* to = problem.grad_weight.as<char>() + row * row_bytes;
      const int64_t first = sorted.starts[row], count = sorted.starts[row + 1] - first;
      sum({.rows = problem.grad_output.data,
           .row_stride_elements = problem.grad_output.strides[0],
           .positions = sorted.positions + first,
           .count = count,
           .columns = columns,
           .sum = to,
           .streams = streams});
    }
  });
}

uint64_t code_version() {
  return hash_text("embedding cpu 2");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports_forward, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports_backward, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::embedding
