// The host side of the CPU kernel for few rows: x is widened and arranged once, tasks take some rows of the weight.
#include <algorithm>
#include <atomic>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/thin.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

constexpr const char* kManyRows = "takes up to 16 rows; of more, decoding is a small part";
constexpr int64_t kTaskRows = 64;  // of the weight

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(problem.x.sizes[0] > kThinRows ? kManyRows : nullptr);
}

// From sums of some columns to the output.
void finish(const Product& problem, const float* sums, int64_t first, int64_t count) {
  const float tensor_scale = problem.tensor_scale.is_present() ? *problem.tensor_scale.as<const float>() : 1;
  const bool has_activation = problem.activation != pointwise::Kind::kIdentity;
  for (int64_t i = 0; i < problem.x.sizes[0]; ++i) {
    for (int64_t j = 0; j < count; ++j) {
      double value = double{sums[i * kTaskRows + j]} * tensor_scale;
      if (problem.bias.is_present()) value += load_element(problem.bias.data, problem.bias.dtype, first + j);
      if (has_activation) value = pointwise::evaluate(problem.activation, value).value;
      store_element(problem.output.data, problem.output.dtype, i * problem.output.strides[0] + first + j, value);
    }
  }
}

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.codes.sizes[0];
  if (m == 0 || n == 0) return;
  const ThinKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kThinKernels);
  const int64_t padded = (k + kThinStep - 1) / kThinStep * kThinStep;
  auto* x = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(m * padded + 16) * sizeof(float)));
  for (int64_t i = 0; i < m; ++i) {
    const char* row = problem.x.as<char>() + i * problem.x.strides[0] * size_of(problem.x.dtype);
    kernels.arrange[cpu_type_index(problem.x.dtype)](problem.format, row, k, x + i * padded);
  }
  const int64_t groups = problem.scales.sizes[1];
  parallel_for(context.threads, (n + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    const int64_t first = task * kTaskRows, count = std::min(kTaskRows, n - first);
    float sums[kThinRows * kTaskRows];
    kernels.multiply(
        {.format = problem.format,
         .group = problem.group,
         .k = k,
         .x = x,
         .m = m,
         .x_stride = padded,
         .codes = problem.codes.as<const uint8_t>() + first * problem.codes.sizes[1],
         .code_stride = problem.codes.sizes[1],
         .scales = problem.scales.as<const char>() + first * groups * size_of(problem.scales.dtype),
         .type = static_cast<ThinType>(cpu_type_index(problem.x.dtype)),
         .zeros = problem.zeros.is_present() ? problem.zeros.as<const uint8_t>() + first * groups : nullptr,
         .groups = groups,
         .rows = count,
         .sums = sums,
         .sums_stride = kTaskRows});
    finish(problem, sums, first, count);
  });
}

uint64_t code_version() {
  return hash_text("quantized_matmul cpu_thin 1");
}

}  // namespace

constinit const registry::Kernel<Product> kCpuThin{
    .name = "cpu_thin", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantized_matmul
