// The CPU kernels of the registry: what they take, and which table of tiles runs.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/matmul/cpu/plan.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kNotThin = "takes at most 16 rows or 16 columns; of bf16 by AVX-512 BF16, not AMX, 64";

const char* obstacle_of(const Product& problem, const DeviceInfo& device) {
  if (problem.up.is_present()) return kOneMatrix;
  return cpu_obstacle(problem.a.dtype, device);
}
registry::Support supports_packed(const Product& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem, device));
}
registry::Support supports_rows(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(why_not_rows(problem, device));
}
registry::Support supports_thin(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
  if (!is_thin(problem) && !is_panel(problem, device.cpu.isa)) return registry::Support::no(kNotThin);
  return registry::Support::yes();
}

registry::Support supports_amx(const Product& problem, const DeviceInfo& device) {
#if defined(__x86_64__)
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  if (device.cpu.isa != CpuIsa::kX86V4Amx) return registry::Support::no("needs a CPU with AMX");
  const bool is_named = problem.precision == Precision::kBf16 || problem.precision == Precision::kBf16x3;
  if (problem.a.dtype != DType::kBFloat16 && !is_named) {
    return registry::Support::no("takes bf16, or fp32 with precision bf16 or bf16x3");
  }
  return registry::Support::yes();
#else
  static_cast<void>(problem), static_cast<void>(device);
  return registry::Support::no("needs an x86 CPU with AMX");
#endif
}
void run_amx([[maybe_unused]] const Product& problem, int, [[maybe_unused]] Context& context) {
#if defined(__x86_64__)
  run_packed(problem, isa_v4amx::kAmxProductKernels, context);
#endif
}

registry::Support supports_dots(const Product& problem, const DeviceInfo& device) {
  const CpuIsa isa = device.cpu.isa;
  if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
  if (isa < CpuIsa::kX86V4Bf16 || isa == CpuIsa::kNeon || isa == CpuIsa::kNeonDot) {
    return registry::Support::no("needs a CPU with AVX-512 BF16 or Arm's BF16");
  }
  if (problem.a.dtype != DType::kBFloat16 && problem.precision != Precision::kBf16) {
    return registry::Support::no("takes bf16, or fp32 with precision bf16");
  }
  return registry::Support::yes();
}
void run_dots(const Product& problem, int, Context& context) {
#if defined(__x86_64__)
  run_packed(problem, isa_v4bf16::kDotProductKernels, context);
#else
  run_packed(problem, isa_neonbf16::kDotProductKernels, context);
#endif
}

void run_packed_of_level(const Product& problem, int, Context& context) {
  run_packed(problem, KP_AT_CPU_LEVEL(context.info->cpu.isa, kProductKernels), context);
}
void run_rows_as_they_lie(const Product& problem, int, Context& context) {
  run_rows(problem, context);
}
void run_thin_of_level(const Product& problem, int, Context& context) {
  run_thin(problem, context);
}

registry::Support supports_pairs(const PairGradient& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.saved.dtype, device));
}
void run_pairs(const PairGradient& problem, int, Context& context) {
  const int64_t rows = problem.saved.sizes[0], columns = problem.grad_output.sizes[1];
  if (rows == 0 || columns == 0) return;
  const auto write = KP_AT_CPU_LEVEL(context.info->cpu.isa, write_pair_gradient);
  const int64_t rows_per_task = std::max<int64_t>((16 << 10) / columns, 1);
  const auto rows_at = [](const TensorView& view, int64_t row) {
    return Rows{static_cast<char*>(view.data) + row * view.strides[0] * size_of(view.dtype), view.dtype,
                view.strides[0]};
  };
  parallel_for(context.threads, (rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t row = task * rows_per_task;
    write({problem.activation, std::min(rows_per_task, rows - row), columns, rows_at(problem.grad_output, row),
           rows_at(problem.saved, row), rows_at(problem.grad_input, row)});
  });
}

uint64_t code_version() {
  return hash_text("matmul cpu 6");
}

}  // namespace

constinit const registry::Kernel<Product> kCpuThin{
    .name = "cpu_thin", .supports = supports_thin, .run = run_thin_of_level, .source_hash = code_version};
constinit const registry::Kernel<Product> kCpuAmx{
    .name = "cpu_amx", .supports = supports_amx, .run = run_amx, .source_hash = code_version};
constinit const registry::Kernel<Product> kCpuDots{
    .name = "cpu_dots", .supports = supports_dots, .run = run_dots, .source_hash = code_version};
constinit const registry::Kernel<Product> kCpuRows{
    .name = "cpu_rows", .supports = supports_rows, .run = run_rows_as_they_lie, .source_hash = code_version};
constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports_packed, .run = run_packed_of_level, .source_hash = code_version};
constinit const registry::Kernel<PairGradient> kPairCpu{
    .name = "cpu", .supports = supports_pairs, .run = run_pairs, .source_hash = code_version};

}  // namespace kernel_pytorch::matmul
