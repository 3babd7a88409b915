// Host side of quantising by groups and back on CUDA.
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/group_quantize/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/group_quantize/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"
#include "kernel_pytorch/ops/support/group_format/check.h"

namespace kernel_pytorch::group_quantize {

constexpr auto kQuantizeConfigFields = config_fields<QuantizeConfig>(config_field<&QuantizeConfig::paired>());
constexpr ConfigFields fields_of(const QuantizeConfig&) {
  return kQuantizeConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/group_quantize/cuda/kernel.cuh";
constexpr int kFloat8Capability = 89;
constexpr const char* kTooLarge = "has 2^30 columns or more, or more threads than a grid";

int64_t groups_of(int64_t columns, int64_t group) {
  return divide_up(columns, group);
}
const char* obstacle_of(const TensorView& values, int64_t group, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(values.dtype, device)) return obstacle;
  const int64_t columns = values.sizes[1];
  const int64_t units = values.sizes[0] * groups_of(columns, group) * (group / kUnit);
  return columns >= int64_t{1} << 30 || units >= (int64_t{1} << 31) * kThreads ? kTooLarge : nullptr;
}

// Vectors of 16 columns: of values and of codes.
bool is_aligned_matrix(const TensorView& values, const TensorView& codes) {
  return values.sizes[1] % kUnit == 0 && vector_access_obstacle(values) == nullptr &&
         reinterpret_cast<uintptr_t>(codes.data) % 16 == 0;
}

std::string format_name(Format format) {
  return concat("kernel_pytorch::group_format::Format(", static_cast<int>(format), ")");
}
DeviceCode quantize_code(DType dtype, Format format, bool is_stochastic, bool is_aligned) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::group_quantize::quantize<", element_type_name(dtype), ", ",
                          format_name(format), ", ", bool_name(is_stochastic), ", ", bool_name(is_aligned), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode dequantize_code(DType dtype, Format format, bool is_aligned) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::group_quantize::dequantize<", element_type_name(dtype), ", ",
                          format_name(format), ", ", bool_name(is_aligned), ">"),
          .minimum_capability = dtype == DType::kFloat8E4M3 ? kFloat8Capability : 80,
          .architecture_specific = false};
}

registry::Support supports_quantize(const Quantize& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem.x, problem.group, device));
}
registry::Support supports_dequantize(const Dequantize& problem, const DeviceInfo& device) {
  TensorView values = problem.output;
  if (values.dtype == DType::kFloat8E4M3) {
    if (const char* missing = feature_obstacle(device, CudaFeature::kFloat8)) return registry::Support::no(missing);
    values.dtype = DType::kBFloat16;
  }
  return registry::Support::unless(obstacle_of(values, problem.group, device));
}

constexpr QuantizeConfig kPairConfigs[] = {{.paired = false}, {.paired = true}};
static_assert(are_legal(kPairConfigs));
constexpr int kPairConfigCount = static_cast<int>(std::size(kPairConfigs));

DeviceCode pairs_code(Format format, int config) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::group_quantize::quantize_pairs<", format_name(format), ", ",
                          bool_name(kPairConfigs[config].paired), ">"),
          .minimum_capability = 90,
          .architecture_specific = false};
}

// bf16 to E2M1, to nearest: two values at a time, 32 units of a row by a warp.
bool takes_pairs(const Quantize& problem, const DeviceInfo& device) {
  return has_feature(device, CudaFeature::kBulkCopy) && problem.x.dtype == DType::kBFloat16 &&
         group_format::is_e2m1(problem.format) && !problem.seed.is_present() &&
         problem.x.sizes[1] % (32 * kUnit) == 0 && problem.x.element_count() / (32 * kUnit) < int64_t{1} << 31 &&
         is_aligned_matrix(problem.x, problem.codes);
}

std::vector<std::string> quantize_configs(const Quantize& problem, const DeviceInfo& device) {
  return takes_pairs(problem, device) ? config_texts(kPairConfigs) : std::vector<std::string>{};
}

template <class Arguments>
void launch(Arguments& arguments, CUkern_st* kernel, Context& context, const std::string& label) {
  const int64_t units = arguments.rows * arguments.groups * (arguments.group / kUnit);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(units, kThreads));
  shape.block_x = kThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void run_quantize(const Quantize& problem, int config, Context& context) {
  static const std::string kLabel = "group_quantize";
  static KernelTable<group_format::kFormats * kPairConfigCount> pairs_kernels;
  static KernelTable<3 * group_format::kFormats * 4> kernels;
  if (problem.x.element_count() == 0) return;
  const bool is_stochastic = problem.seed.is_present(), is_aligned = is_aligned_matrix(problem.x, problem.codes);
  const int entry = (cuda_type_index(problem.x.dtype) * group_format::kFormats + static_cast<int>(problem.format)) * 4 +
                    is_stochastic * 2 + is_aligned;
  CUkern_st* kernel = takes_pairs(problem, *context.info)
                          ? pairs_kernels.get(static_cast<int>(problem.format) * kPairConfigCount + config, context,
                                              [&] { return pairs_code(problem.format, config); })
                          : kernels.get(entry, context, [&] {
                              return quantize_code(problem.x.dtype, problem.format, is_stochastic, is_aligned);
                            });
  const int64_t columns = problem.x.sizes[1];
  QuantizeArguments arguments{.x = problem.x.data,
                              .row_stride = problem.x.strides[0],
                              .rows = problem.x.sizes[0],
                              .columns = static_cast<int32_t>(columns),
                              .group = static_cast<int32_t>(problem.group),
                              .groups = static_cast<int32_t>(groups_of(columns, problem.group)),
                              .tensor_scale = problem.tensor_scale.as<const float>(),
                              .seed = problem.seed.as<const int64_t>(),
                              .codes = problem.codes.as<uint8_t>(),
                              .code_stride = problem.codes.sizes[1],
                              .scales = problem.scales.data,
                              .zeros = problem.zeros.as<uint8_t>(),
                              .warps = static_cast<uint32_t>(problem.x.element_count() / (32 * kUnit)),
                              .warps_of_row = make_divider(static_cast<uint32_t>(divide_up(columns, 32 * kUnit))),
                              .row_gap = problem.x.strides[0] - columns};
  launch(arguments, kernel, context, kLabel);
}

void run_dequantize(const Dequantize& problem, int, Context& context) {
  static const std::string kLabel = "group_dequantize";
  static KernelTable<4 * group_format::kFormats * 2> kernels;
  if (problem.output.element_count() == 0) return;
  const bool is_aligned = is_aligned_matrix(problem.output, problem.codes);
  const int type = problem.output.dtype == DType::kFloat8E4M3 ? 3 : cuda_type_index(problem.output.dtype);
  const int entry = (type * group_format::kFormats + static_cast<int>(problem.format)) * 2 + is_aligned;
  CUkern_st* kernel =
      kernels.get(entry, context, [&] { return dequantize_code(problem.output.dtype, problem.format, is_aligned); });
  const int64_t columns = problem.output.sizes[1];
  DequantizeArguments arguments{.codes = problem.codes.as<const uint8_t>(),
                                .code_stride = problem.codes.sizes[1],
                                .rows = problem.output.sizes[0],
                                .columns = static_cast<int32_t>(columns),
                                .group = static_cast<int32_t>(problem.group),
                                .groups = static_cast<int32_t>(groups_of(columns, problem.group)),
                                .scales = problem.scales.data,
                                .scale_type = group_format::scale_type_of(problem.scales.dtype),
                                .zeros = problem.zeros.as<const uint8_t>(),
                                .tensor_scale = problem.tensor_scale.as<const float>(),
                                .output = problem.output.data,
                                .row_stride = problem.output.strides[0]};
  launch(arguments, kernel, context, kLabel);
}

std::vector<DeviceCode> quantize_device_code() {
  std::vector<DeviceCode> codes;
  for (int format = 0; format < group_format::kFormats; ++format) {
    codes.push_back(quantize_code(DType::kBFloat16, static_cast<Format>(format), false, true));
  }
  codes.push_back(quantize_code(DType::kFloat32, Format::kNvfp4, true, false));
  for (int config = 0; config < kPairConfigCount; ++config) {
    codes.push_back(pairs_code(Format::kNvfp4, config));
    codes.push_back(pairs_code(Format::kMxfp4, config));
  }
  return codes;
}
std::vector<DeviceCode> dequantize_device_code() {
  std::vector<DeviceCode> codes;
  for (int format = 0; format < group_format::kFormats; ++format) {
    codes.push_back(dequantize_code(DType::kBFloat16, static_cast<Format>(format), true));
  }
  codes.push_back(dequantize_code(DType::kFloat8E4M3, Format::kMxfp4, true));
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Quantize> kQuantizeCuda{.name = "cuda",
                                                         .supports = supports_quantize,
                                                         .configs = quantize_configs,
                                                         .run = run_quantize,
                                                         .source_hash = source_hash,
                                                         .device_code = quantize_device_code};
constinit const registry::Kernel<Dequantize> kDequantizeCuda{.name = "cuda",
                                                             .supports = supports_dequantize,
                                                             .run = run_dequantize,
                                                             .source_hash = source_hash,
                                                             .device_code = dequantize_device_code};

}  // namespace kernel_pytorch::group_quantize
