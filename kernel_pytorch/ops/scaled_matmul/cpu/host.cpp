// The host side of the CPU kernel: blocks of the output, taken one by one by workers that each own the memory in which
// codes become floats.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/scaled_matmul/cpu/block.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

OutputType output_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return OutputType::kFloat32;
    case DType::kBFloat16:
      return OutputType::kBFloat16;
    case DType::kFloat16:
      return OutputType::kFloat16;
    case DType::kFloat8E4M3:
      return OutputType::kE4M3;
    default:
      return OutputType::kE5M2;
  }
}

CodeRows rows_of_codes(const TensorView& view) {
  return {view.as<const uint8_t>(), view.strides[0], view.dtype == DType::kFloat8E5M2};
}
ScaleRows rows_of_scale(const TensorView& scale, int64_t rows) {
  const ScaleLayout layout(scale, rows);
  return {layout.data, layout.rows_each, layout.row_stride, layout.block_stride};
}

// The bias as floats in scratch memory, or null.
float* bias_of(const Product& problem, Context& context) {
  if (!problem.bias.is_present()) return nullptr;
  const int64_t n = problem.bias.sizes[0];
  auto* bias = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(n) * sizeof(float)));
  for (int64_t j = 0; j < n; ++j) {
    bias[j] = static_cast<float>(load_element(problem.bias.data, problem.bias.dtype, j));
  }
  return bias;
}

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0];
  if (m == 0 || n == 0) return;
  const auto multiply_block = KP_AT_CPU_LEVEL(context.info->cpu.isa, multiply_block);
  const float* bias = bias_of(problem, context);
  BlockProduct common{.a = rows_of_codes(problem.a),
                      .b = rows_of_codes(problem.b),
                      .scale_a = rows_of_scale(problem.scale_a, m),
                      .scale_b = rows_of_scale(problem.scale_b, n),
                      .k = problem.a.sizes[1],
                      .is_blocked = is_blocked(problem),
                      .output_scale = problem.output_scale.is_present() ? *problem.output_scale.as<const float>() : 1,
                      .output_type = output_type_of(problem.output.dtype),
                      .output_stride = problem.output.strides[0]};
  const int64_t row_blocks = (m + kBlockRows - 1) / kBlockRows, column_blocks = (n + kBlockColumns - 1) / kBlockColumns;
  const int64_t tasks = row_blocks * column_blocks;
  const int64_t workers = std::min<int64_t>(tasks, context.threads == nullptr ? 1 : context.threads->count());
  auto* work =
      static_cast<float*>(context.scratch->allocate(static_cast<size_t>(workers * kWorkFloats) * sizeof(float)));
  std::vector<float> largest(static_cast<size_t>(workers), 0);
  TaskQueue queue(tasks);
  parallel_for(context.threads, workers, [&](int64_t worker) {
    BlockProduct block = common;
    block.work = work + worker * kWorkFloats;
    for (int64_t task; (task = queue.take()) >= 0;) {
      block.first_row = task % row_blocks * kBlockRows;
      block.rows = std::min(kBlockRows, m - block.first_row);
      block.first_column = task / row_blocks * kBlockColumns;
      block.columns = std::min(kBlockColumns, n - block.first_column);
      block.bias = bias == nullptr ? nullptr : bias + block.first_column;
      const int64_t first = block.first_row * problem.output.strides[0] + block.first_column;
      block.output = problem.output.as<char>() + first * size_of(problem.output.dtype);
      largest[worker] = std::max(largest[worker], multiply_block(block));
    }
  });
  if (!problem.amax.is_present()) return;
  auto& amax = *problem.amax.as<float>();
  amax = std::fmax(amax, *std::ranges::max_element(largest));
}

uint64_t code_version() {
  return hash_text("scaled_matmul cpu 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpu{
    .name = "cpu_decode", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::scaled_matmul
