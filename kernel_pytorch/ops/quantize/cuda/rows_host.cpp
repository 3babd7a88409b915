// Host side of quantising rows in one visit.
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantize {
namespace {

constexpr const char* kRowSource = "kernel_pytorch/ops/quantize/cuda/rows.cuh";
constexpr const char* kOnlyRows =
    "takes scales of rows alone: no transposed codes, producer, seed, amax or found_nonfinite";
constexpr const char* kRowVectors = "needs rows 16 bytes aligned and dense, a multiple of 8 columns";
constexpr const char* kLongRows = "a row is more than 32 KB";
constexpr const char* kNothing = "x is empty";
constexpr int kRowVariants = 4;  // 1, 2, 4 or 8 vectors of a thread

// The least power of two that holds a row.
int variant_of_rows(const Quantize& problem) {
  const int64_t vectors = divide_up(problem.x.sizes[1] * size_of(problem.x.dtype), kVectorBytes * kRowThreads);
  int variant = 0;
  while (int64_t{1} << variant < vectors) ++variant;
  return variant;
}

registry::Support supports_rows(const Quantize& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return registry::Support::no(obstacle);
  if (const char* obstacle = float8_obstacle(device)) return registry::Support::no(obstacle);
  if (problem.x.element_count() == 0) return registry::Support::no(kNothing);
  const bool is_plain = problem.granularity == Granularity::kRow && problem.codes.is_present() &&
                        !problem.transposed.is_present() && !problem.seed.is_present() && !has_producer(problem) &&
                        !problem.amax.is_present() && !problem.found_nonfinite.is_present();
  if (!is_plain) return registry::Support::no(kOnlyRows);
  const bool has_vectors = problem.x.sizes[1] % 8 == 0 && problem.x.strides[1] == 1 && has_aligned_rows(problem.x) &&
                           has_aligned_rows(problem.codes, 8);
  if (!has_vectors) return registry::Support::no(kRowVectors);
  const bool is_long = problem.x.sizes[1] * size_of(problem.x.dtype) > kVectorBytes * kRowThreads * kMostRowVectors;
  return registry::Support::unless(is_long || problem.x.sizes[0] >= int64_t{1} << 31 ? kLongRows : nullptr);
}

DeviceCode rows_code(DType dtype, bool is_e5m2, int variant) {
  return {.source = kRowSource,
          .entry = concat("kernel_pytorch::quantize::cast_rows_at_once<", element_type_name(dtype),
                          ", kernel_pytorch::tile::Float8", is_e5m2 ? "E5M2" : "E4M3", ", ", 1 << variant, ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}

void run_rows(const Quantize& problem, int, Context& context) {
  static const std::string kLabel = "quantize rows";
  static KernelTable<std::size(kCudaTypes) * 2 * kRowVariants> table;
  const bool is_e5m2 = code_type_of(problem) == DType::kFloat8E5M2;
  const int variant = variant_of_rows(problem);
  CUkern_st* kernel = table.get((cuda_type_index(problem.x.dtype) * 2 + is_e5m2) * kRowVariants + variant, context,
                                [&] { return rows_code(problem.x.dtype, is_e5m2, variant); });
  RowArguments arguments{.x = problem.x.data,
                         .row_stride = problem.x.strides[0],
                         .codes_stride = problem.codes.strides[0],
                         .columns = static_cast<int32_t>(problem.x.sizes[1]),
                         .rule = rule_of(problem),
                         .codes = problem.codes.as<uint8_t>(),
                         .scales = {problem.scales.as<float>(), problem.scales.strides[0], problem.scales.strides[1]}};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(problem.x.sizes[0]);
  shape.block_x = kRowThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t rows_source_hash() {
  return jit::source_hash(kRowSource);
}
std::vector<DeviceCode> rows_device_code() {
  std::vector<DeviceCode> codes;
  for (int variant = 0; variant < kRowVariants; ++variant) {
    codes.push_back(rows_code(DType::kBFloat16, false, variant));
  }
  codes.push_back(rows_code(DType::kFloat32, true, kRowVariants - 1));
  codes.push_back(rows_code(DType::kFloat16, true, 0));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Quantize> kCudaRows{.name = "cuda_rows",
                                                     .supports = supports_rows,
                                                     .run = run_rows,
                                                     .source_hash = rows_source_hash,
                                                     .device_code = rows_device_code};

}  // namespace kernel_pytorch::quantize
