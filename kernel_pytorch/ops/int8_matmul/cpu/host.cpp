// The host side of the CPU kernels: rows of x become codes once, tasks take blocks of the output.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/int8_matmul/cpu/integers.h"
#include "kernel_pytorch/ops/int8_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::int8_matmul {
namespace {

constexpr int64_t kBlockRows = 32, kBlockColumns = 64;
constexpr const char* kNoDots = "needs a CPU with AVX-512 VNNI or Arm's dot products";

using Multiply = void (*)(const IntegerBlock&);

void finish_block(const Product& problem, const float* sums, const float* scales, int64_t first_row, int64_t rows,
                  int64_t first_column, int64_t columns) {
  const bool has_activation = problem.activation != pointwise::Kind::kIdentity;
  for (int64_t i = 0; i < rows; ++i) {
    const float scale = scales[first_row + i];
    const int64_t place = (first_row + i) * problem.output.strides[0] + first_column;
    const float* row = sums + i * kBlockColumns;
    if (!has_activation && !problem.bias.is_present() && problem.output.dtype == DType::kBFloat16) {  // the usual case
      auto* output = problem.output.as<BFloat16>() + place;
      for (int64_t j = 0; j < columns; ++j) output[j] = from_float<BFloat16>(row[j] * scale);
      continue;
    }
    for (int64_t j = 0; j < columns; ++j) {
      double value = double{row[j]} * scale;
      if (problem.bias.is_present()) value += load_element(problem.bias.data, problem.bias.dtype, first_column + j);
      if (has_activation) value = pointwise::evaluate(problem.activation, value).value;
      store_element(problem.output.data, problem.output.dtype, place + j, value);
    }
  }
}

void run_with(const Product& problem, Context& context, Multiply multiply) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.weight.sizes[0];
  if (m == 0 || n == 0) return;
  const IntegerKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kIntegerKernels);
  const int64_t padded = (k + 63) / 64 * 64;  // what lies behind k meets zeros of the weight
  auto* codes = static_cast<uint8_t*>(context.scratch->allocate(static_cast<size_t>(m * padded + 64)));
  auto* scales = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(m) * sizeof(float)));
  parallel_for(context.threads, m, [&](int64_t i) {
    uint8_t* row = codes + i * padded;
    std::fill(row + k, row + padded, uint8_t{128});
    if (has_codes(problem)) {
      const auto* given = problem.x.as<const int8_t>() + i * problem.x.strides[0];
      for (int64_t p = 0; p < k; ++p) row[p] = static_cast<uint8_t>(given[p] ^ 0x80);
      scales[i] = problem.scale_x.as<const float>()[i];
    } else {
      const char* from = problem.x.as<const char>() + i * problem.x.strides[0] * size_of(problem.x.dtype);
      scales[i] = kernels.round_row[cpu_type_index(problem.x.dtype)](from, k, row);
    }
  });
  const int64_t row_blocks = (m + kBlockRows - 1) / kBlockRows, column_blocks = (n + kBlockColumns - 1) / kBlockColumns;
  const int64_t groups = problem.scale_weight.sizes[1];
  parallel_for(context.threads, row_blocks * column_blocks, [&](int64_t task) {
    const int64_t first_row = task % row_blocks * kBlockRows, rows = std::min(kBlockRows, m - first_row);
    const int64_t first_column = task / row_blocks * kBlockColumns, columns = std::min(kBlockColumns, n - first_column);
    alignas(64) float sums[kBlockRows * kBlockColumns];
    multiply({.x = codes + first_row * padded,
              .m = rows,
              .x_stride = padded,
              .weight = problem.weight.as<const int8_t>() + first_column * k,
              .n = columns,
              .k = k,
              .block = block_of(problem),
              .scales = problem.scale_weight.as<const float>() + first_column * groups,
              .groups = groups,
              .sums = sums,
              .sums_stride = kBlockColumns});
    finish_block(problem, sums, scales, first_row, rows, first_column, columns);
  });
}

void run_level(const Product& problem, int, Context& context) {
  const IntegerKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kIntegerKernels);
  run_with(problem, context, kernels.multiply);
}

registry::Support supports_dots(const Product&, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
#if defined(__x86_64__)
  static const bool has_vnni = __builtin_cpu_supports("avx512vnni") != 0;
  const bool is_level = device.cpu.isa >= CpuIsa::kX86V4 && device.cpu.isa <= CpuIsa::kX86V4Amx;
  return registry::Support::unless(has_vnni && is_level ? nullptr : kNoDots);
#else
  return registry::Support::unless(device.cpu.isa >= CpuIsa::kNeonDot ? nullptr : kNoDots);
#endif
}

void run_dots(const Product& problem, int, Context& context) {
#if defined(__x86_64__)
  run_with(problem, context, isa_v4vnni::multiply_dots);
#elif defined(__aarch64__)
  const bool has_matrices = context.info->cpu.isa >= CpuIsa::kNeonBf16;
  run_with(problem, context, has_matrices ? isa_neonbf16::multiply_dots : isa_neondot::multiply_dots);
#endif
}

uint64_t level_version() {
  return hash_text("int8_matmul cpu 1");
}
uint64_t dots_version() {
  return hash_text("int8_matmul cpu_dots 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpuDots{
    .name = "cpu_dots", .supports = supports_dots, .run = run_dots, .source_hash = dots_version};
constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports_on_cpu<Product>, .run = run_level, .source_hash = level_version};

}  // namespace kernel_pytorch::int8_matmul
