// The host side of the CPU kernels for few rows: x is arranged once, tasks take some rows of the weight.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/dots.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/integers.h"
#include "kernel_pytorch/ops/quantized_matmul/cpu/thin.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

constexpr const char* kManyRows = "takes up to 16 rows; of more, decoding is a small part";
constexpr const char* kMoreRows = "takes up to 4 rows; of more, the digits of x are most of the work";
constexpr const char* kNoIntegers = "needs a CPU with AVX-512 VNNI";
constexpr const char* kNeeds16Bits = "takes bf16 and fp16";
constexpr const char* kNoDots = "needs a CPU with AVX-512 BF16";
constexpr const char* kNeedsBf16 = "takes bf16";
constexpr const char* kNoMxfp8 = "does not take mxfp8";
constexpr const char* kNoBitStream = "takes codes of 4 and 8 bits";
constexpr int64_t kTaskRows = 64;  // of the weight

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(problem.x.sizes[0] > kThinRows ? kManyRows : nullptr);
}

// From sums of some columns to the output; strides of a row of x and of a column.
void finish(const Product& problem, const float* sums, int64_t row_stride, int64_t column_stride, int64_t first,
            int64_t count) {
  const float tensor_scale = problem.tensor_scale.is_present() ? *problem.tensor_scale.as<const float>() : 1;
  const bool has_activation = problem.activation != pointwise::Kind::kIdentity;
  if (!has_activation && !problem.bias.is_present() && problem.output.dtype == DType::kBFloat16) {  // the usual case
    for (int64_t i = 0; i < problem.x.sizes[0]; ++i) {
      auto* output = problem.output.as<BFloat16>() + i * problem.output.strides[0] + first;
      for (int64_t j = 0; j < count; ++j) {
        output[j] = from_float<BFloat16>(sums[i * row_stride + j * column_stride] * tensor_scale);
      }
    }
    return;
  }
  for (int64_t i = 0; i < problem.x.sizes[0]; ++i) {
    for (int64_t j = 0; j < count; ++j) {
      double value = double{sums[i * row_stride + j * column_stride]} * tensor_scale;
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
    finish(problem, sums, kTaskRows, 1, first, count);
  });
}

registry::Support supports_dots([[maybe_unused]] const Product& problem, [[maybe_unused]] const DeviceInfo& device) {
#if defined(__x86_64__)
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  if (device.cpu.isa < CpuIsa::kX86V4Bf16 || device.cpu.isa > CpuIsa::kX86V4Amx) return registry::Support::no(kNoDots);
  if (problem.x.dtype != DType::kBFloat16) return registry::Support::no(kNeedsBf16);
  if (problem.format == Format::kMxfp8) return registry::Support::no(kNoMxfp8);
  if (group_format::is_bit_stream(problem.format)) return registry::Support::no(kNoBitStream);
  return registry::Support::unless(problem.x.sizes[0] > kThinRows ? kManyRows : nullptr);
#else
  return registry::Support::no(kNoDots);
#endif
}

void run_dots([[maybe_unused]] const Product& problem, int, [[maybe_unused]] Context& context) {
#if defined(__x86_64__)
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.codes.sizes[0];
  if (m == 0 || n == 0) return;
  const int64_t padded = (k + kDotStep - 1) / kDotStep * kDotStep, rows = dot_rows(m);
  const auto bytes = static_cast<size_t>(rows * padded) * sizeof(uint16_t);
  auto* x = static_cast<uint16_t*>(context.scratch->allocate(bytes));
  std::memset(x, 0, bytes);
  for (int64_t i = 0; i < m; ++i) {
    isa_v4bf16::arrange_dots(problem.format, problem.x.as<const uint16_t>() + i * problem.x.strides[0], k,
                             x + i * kDotStep, rows * kDotStep);
  }
  float byte_scale[256];
  for (uint32_t i = 0; i < 256; ++i) {
    byte_scale[i] = problem.format == Format::kNvfp4 ? group_format::e4m3_value(i) : group_format::e8m0_value(i);
  }
  const int64_t groups = problem.scales.sizes[1];
  parallel_for(context.threads, (n + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    const int64_t first = task * kTaskRows, count = std::min(kTaskRows, n - first);
    float sums[kTaskRows * kDotSums];
    isa_v4bf16::multiply_dots(
        {.format = problem.format,
         .group = problem.group,
         .k = k,
         .group_shift = std::countr_zero(static_cast<uint64_t>(problem.group)),
         .x = x,
         .m = m,
         .codes = problem.codes.as<const uint8_t>() + first * problem.codes.sizes[1],
         .code_stride = problem.codes.sizes[1],
         .scales = problem.scales.as<const char>() + first * groups * size_of(problem.scales.dtype),
         .byte_scale = byte_scale,
         .zeros = problem.zeros.is_present() ? problem.zeros.as<const uint8_t>() + first * groups : nullptr,
         .groups = groups,
         .rows = count,
         .sums = sums});
    finish(problem, sums, 1, kDotSums, first, count);
  });
#endif
}

registry::Support supports_integers([[maybe_unused]] const Product& problem,
                                    [[maybe_unused]] const DeviceInfo& device) {
#if defined(__x86_64__)
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  static const bool has_vnni = __builtin_cpu_supports("avx512vnni") != 0;
  const bool is_level = device.cpu.isa >= CpuIsa::kX86V4 && device.cpu.isa <= CpuIsa::kX86V4Amx;
  if (!has_vnni || !is_level) return registry::Support::no(kNoIntegers);
  if (size_of(problem.x.dtype) != 2) return registry::Support::no(kNeeds16Bits);
  if (problem.format == Format::kMxfp8) return registry::Support::no(kNoMxfp8);
  if (group_format::is_bit_stream(problem.format)) return registry::Support::no(kNoBitStream);
  return registry::Support::unless(problem.x.sizes[0] > kIntegerRows ? kMoreRows : nullptr);
#else
  return registry::Support::no(kNoIntegers);
#endif
}

void run_integers([[maybe_unused]] const Product& problem, int, [[maybe_unused]] Context& context) {
#if defined(__x86_64__)
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.codes.sizes[0];
  if (m == 0 || n == 0) return;
  const int64_t units = (k + kUnitColumns - 1) / kUnitColumns, rows = integer_rows(m);
  const auto bytes = static_cast<size_t>(rows * units) * sizeof(IntegerUnit);
  auto* x = static_cast<IntegerUnit*>(context.scratch->allocate(bytes));
  if (rows > m) std::memset(static_cast<void*>(x), 0, bytes);
  for (int64_t i = 0; i < m; ++i) {
    const bool is_finite =
        isa_v4vnni::arrange_integers({.format = problem.format,
                                      .group = problem.group,
                                      .data = problem.x.as<const uint16_t>() + i * problem.x.strides[0],
                                      .is_half = problem.x.dtype == DType::kFloat16,
                                      .k = k,
                                      .rows = m},
                                     x + i);
    // An infinity would spread over its unit as NaN.
    if (!is_finite) return run(problem, 0, context);
  }
  const int64_t groups = problem.scales.sizes[1];
  parallel_for(context.threads, (n + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    const int64_t first = task * kTaskRows, count = std::min(kTaskRows, n - first);
    static_assert(kIntegerSums == kIntegerRows);
    float sums[kTaskRows * kIntegerSums];
    isa_v4vnni::multiply_integers(
        {.format = problem.format,
         .group = problem.group,
         .k = k,
         .x = x,
         .m = m,
         .codes = problem.codes.as<const uint8_t>() + first * problem.codes.sizes[1],
         .code_stride = problem.codes.sizes[1],
         .scales = problem.scales.as<const char>() + first * groups * size_of(problem.scales.dtype),
         .has_half_scales = problem.scales.dtype == DType::kFloat16,
         .zeros = problem.zeros.is_present() ? problem.zeros.as<const uint8_t>() + first * groups : nullptr,
         .groups = groups,
         .rows = count,
         .sums = sums});
    finish(problem, sums, 1, kIntegerSums, first, count);
  });
#endif
}

uint64_t code_version() {
  return hash_text("quantized_matmul cpu_thin 2");
}
uint64_t dots_version() {
  return hash_text("quantized_matmul cpu_dots 2");
}
uint64_t integers_version() {
  return hash_text("quantized_matmul cpu_integers 2");
}

}  // namespace

constinit const registry::Kernel<Product> kCpuThin{
    .name = "cpu_thin", .supports = supports, .run = run, .source_hash = code_version};
constinit const registry::Kernel<Product> kCpuDots{
    .name = "cpu_dots", .supports = supports_dots, .run = run_dots, .source_hash = dots_version};
constinit const registry::Kernel<Product> kCpuIntegers{
    .name = "cpu_integers", .supports = supports_integers, .run = run_integers, .source_hash = integers_version};

}  // namespace kernel_pytorch::quantized_matmul
