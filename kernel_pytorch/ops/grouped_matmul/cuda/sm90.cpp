// Host side of the grouped products on Hopper: how a problem becomes the arguments of the kernel that
// ops/engines/gemm/sm90/host.h launches.
#include <algorithm>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

using product::Sm90Epilogue;
using product::Sm90Form;
using product::Sm90Grouping;
using product::Sm90Sizes;
using product::Sm90Variant;

constexpr const char* kSm90Needs16Bit = "takes bf16 and fp16";
constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kSm90Misaligned = "rows of a tensor do not begin at multiples of 16 bytes";
constexpr const char* kSm90Columns = "columns of the output are no multiple of 8";
constexpr const char* kBiasType = "bias has neither the output's type nor fp32";
constexpr const char* kHalves = "packed gates are no multiple of 64";

const char* common_obstacle(DType dtype, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(dtype, device)) return obstacle;
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return missing;
  return size_of(dtype) == 2 ? nullptr : kSm90Needs16Bit;
}

Sm90Sizes sizes_of(const Product& problem) {
  return {1, rows_of(problem), problem.b.sizes[2], problem.b.sizes[1]};
}

registry::Support supports_rows(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = common_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  const Sm90Sizes sizes = sizes_of(problem);
  if (sizes.m == 0 || sizes.n == 0 || sizes.k == 0 || problem.b.sizes[0] == 0) return registry::Support::no(kNothing);
  for (const TensorView* view : {&problem.a, &problem.output, &problem.preactivation}) {
    if (!has_aligned_rows(*view)) return registry::Support::no(kSm90Misaligned);
  }
  if (!has_aligned_rows(problem.b, kVectorBytes, is_row_major(problem.b) ? 2 : 1)) {
    return registry::Support::no(kSm90Misaligned);
  }
  const TensorView& bias = problem.bias;
  if (bias.is_present() && bias.dtype != problem.output.dtype && bias.dtype != DType::kFloat32) {
    return registry::Support::no(kBiasType);
  }
  const int64_t per_vector = kVectorBytes / size_of(problem.output.dtype);
  if (problem.output.sizes[1] % per_vector != 0) return registry::Support::no(kSm90Columns);
  if (problem.form == Form::kPackedGated && problem.output.sizes[1] % 64 != 0) return registry::Support::no(kHalves);
  return registry::Support::unless(product::sm90_size_obstacle(sizes));
}

registry::Support supports_depth(const WeightGradient& problem, const DeviceInfo& device) {
  if (const char* obstacle = common_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (problem.output.element_count() == 0 || rows_of(problem) == 0) return registry::Support::no(kNothing);
  if (!has_aligned_rows(problem.a) || !has_aligned_rows(problem.b) ||
      !has_aligned_rows(problem.output, kVectorBytes, is_row_major(problem.output) ? 2 : 1)) {
    return registry::Support::no(kSm90Misaligned);
  }
  return registry::Support::unless(
      product::sm90_size_obstacle({problem.output.sizes[0], problem.a.sizes[1], problem.b.sizes[1], rows_of(problem)}));
}

product::Sm90Operands operands_of(const Product& problem) {
  const product::Sm90Type type = product::sm90_type(problem.a.dtype);
  return {.a = type,
          .b = type,
          .a_rows = false,
          .b_columns = is_row_major(problem.b),
          .b_halves = problem.form == Form::kPackedGated,
          .grouping = Sm90Grouping::kRows,
          .gathers_a = problem.gather.is_present()};
}
product::Sm90Operands depth_operands(product::Sm90Type type, bool gathers_a, bool gathers_b) {
  return {.a = type,
          .b = type,
          .a_rows = true,
          .b_columns = true,
          .grouping = Sm90Grouping::kDepth,
          .gathers_a = gathers_a,
          .gathers_b = gathers_b};
}
// A column-major output is the row-major one of the operands exchanged.
bool swaps(const WeightGradient& problem) {
  return !is_row_major(problem.output);
}
product::Sm90Operands operands_of(const WeightGradient& problem) {
  const bool gathers_a = problem.gather_a.is_present(), gathers_b = problem.gather_b.is_present();
  return depth_operands(product::sm90_type(problem.a.dtype), swaps(problem) ? gathers_b : gathers_a,
                        swaps(problem) ? gathers_a : gathers_b);
}
template <class Problem>
std::span<const product::Sm90Config> configs_of(const Problem& problem) {
  return product::sm90_grouped_configs(operands_of(problem));
}
template <class Problem>
std::vector<std::string> configs(const Problem& problem, const DeviceInfo&) {
  return config_texts(configs_of(problem));
}

int rows_heuristic(const Product& problem, const DeviceInfo& device) {
  const Sm90Sizes sizes = sizes_of(problem);
  return product::sm90_heuristic(configs_of(problem), {1, sizes.m, sizes.n, sizes.k}, 2, device.cuda.multiprocessors);
}
int depth_heuristic(const WeightGradient& problem, const DeviceInfo& device) {
  const int64_t groups = std::max<int64_t>(problem.output.sizes[0], 1);
  const bool is_swapped = swaps(problem);
  const int64_t m = (is_swapped ? problem.b : problem.a).sizes[1], n = (is_swapped ? problem.a : problem.b).sizes[1];
  return product::sm90_heuristic(configs_of(problem), {groups, m, n, rows_of(problem) / groups}, 2,
                                 device.cuda.multiprocessors);
}

Sm90Form form_of(Form form) {
  return form == Form::kPlain ? Sm90Form::kPlain : form == Form::kGated ? Sm90Form::kGated : Sm90Form::kGatedHalves;
}

Sm90Variant variant_of(const Product& problem, int config) {
  return {.config = configs_of(problem)[static_cast<size_t>(config)],
          .operands = operands_of(problem),
          .epilogue = {.form = form_of(problem.form),
                       .kind = problem.activation,
                       .bias = problem.bias.is_present(),
                       .preactivation = problem.preactivation.is_present(),
                       .float_bias = problem.bias.is_present() && problem.bias.dtype != problem.output.dtype,
                       .grouped = true,
                       .clamped = problem.limit > 0},
          .output = problem.output.dtype};
}

TensorView with_dense_last(TensorView view) {
  if (is_row_major(view)) return view;
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

void run_rows(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "grouped_matmul sm90";
  product::Sm90Arguments arguments{};
  arguments.alpha = arguments.beta = 1.0f;
  arguments.bias = problem.bias.data;
  arguments.groups = {.ends = problem.offsets.as<const int32_t>(),
                      .gather_a = problem.gather.as<const int32_t>(),
                      .gather_b = nullptr,
                      .count = static_cast<int32_t>(problem.b.sizes[0]),
                      .rows = static_cast<int32_t>(rows_of(problem)),
                      .depth = static_cast<int32_t>(problem.b.sizes[1]),
                      .a = problem.a.data,
                      .b = nullptr,
                      .a_stride = problem.a.strides[0],
                      .b_stride = 0,
                      .output = problem.output.data,
                      .preactivation = problem.preactivation.data,
                      .output_stride = problem.output.strides[0],
                      .preactivation_stride = problem.preactivation.is_present() ? problem.preactivation.strides[0] : 0,
                      .bias_stride = problem.bias.is_present() ? problem.bias.strides[0] : 0,
                      .scale_b_stride = 0,
                      .limit = static_cast<float>(problem.limit),
                      .slope = static_cast<float>(problem.slope)};
  const product::Sm90Tensors tensors = {.a = product::sm90_batch_of_one(problem.a),
                                        .b = with_dense_last(problem.b),
                                        .output = product::sm90_batch_of_one(problem.output),
                                        .preactivation = product::sm90_batch_of_one(problem.preactivation)};
  product::sm90_launch(variant_of(problem, config), tensors, sizes_of(problem), arguments, context, kLabel);
}

void run_depth(const WeightGradient& problem, int config, Context& context) {
  static const std::string kLabel = "grouped_matmul_weight sm90";
  const bool is_swapped = swaps(problem);
  const TensorView &a = is_swapped ? problem.b : problem.a, &b = is_swapped ? problem.a : problem.b;
  const TensorView &gather_a = is_swapped ? problem.gather_b : problem.gather_a,
                   &gather_b = is_swapped ? problem.gather_a : problem.gather_b;
  const TensorView output = with_dense_last(problem.output);
  product::Sm90Arguments arguments{};
  arguments.alpha = arguments.beta = 1.0f;
  arguments.groups = {.ends = problem.offsets.as<const int32_t>(),
                      .gather_a = gather_a.as<const int32_t>(),
                      .gather_b = gather_b.as<const int32_t>(),
                      .count = static_cast<int32_t>(output.sizes[0]),
                      .rows = static_cast<int32_t>(rows_of(problem)),
                      .depth = 0,
                      .a = a.data,
                      .b = b.data,
                      .a_stride = a.strides[0],
                      .b_stride = b.strides[0],
                      .output = nullptr,
                      .preactivation = nullptr,
                      .output_stride = 0,
                      .preactivation_stride = 0,
                      .bias_stride = 0,
                      .scale_b_stride = 0,
                      .limit = 0,
                      .slope = 0};
  const product::Sm90Tensors tensors = {
      .a = product::sm90_batch_of_one(a), .b = product::sm90_batch_of_one(b), .output = output, .preactivation = {}};
  const Sm90Variant variant = {.config = configs_of(problem)[static_cast<size_t>(config)],
                               .operands = operands_of(problem),
                               .epilogue = {},
                               .output = output.dtype};
  product::sm90_launch(variant, tensors, {output.sizes[0], a.sizes[1], b.sizes[1], rows_of(problem)}, arguments,
                       context, kLabel);
}

std::vector<DeviceCode> rows_device_code() {
  const auto bf16 = product::Sm90Type::kBFloat16;
  std::vector<DeviceCode> codes;
  const auto add = [&](bool b_columns, bool gathers, Sm90Epilogue epilogue, int config = 0,
                       DType output = DType::kBFloat16) {
    epilogue.grouped = true;
    const product::Sm90Operands operands = {.a = bf16,
                                            .b = bf16,
                                            .a_rows = false,
                                            .b_columns = b_columns,
                                            .b_halves = epilogue.form == Sm90Form::kGatedHalves,
                                            .grouping = Sm90Grouping::kRows,
                                            .gathers_a = gathers};
    codes.push_back(product::sm90_code(
        {product::sm90_grouped_configs(operands)[static_cast<size_t>(config)], operands, epilogue, output}));
  };
  for (const bool b_columns : {false, true}) {
    add(b_columns, false, {});
    add(b_columns, true, {});
    for (const bool preactivation : {false, true}) {
      add(b_columns, true, {.form = Sm90Form::kGatedHalves, .kind = Kind::kSilu, .preactivation = preactivation});
    }
  }
  add(false, false, {.bias = true});
  add(false, true, {}, 1);
  add(true, true,
      {.form = Sm90Form::kGated, .kind = Kind::kSilu, .bias = true, .preactivation = true, .clamped = true});
  add(false, false, {}, 0, DType::kFloat32);
  return codes;
}

std::vector<DeviceCode> depth_device_code() {
  std::vector<DeviceCode> codes;
  const auto add = [&](bool gathers_a, bool gathers_b, int config, DType output = DType::kBFloat16) {
    const product::Sm90Operands operands = depth_operands(product::Sm90Type::kBFloat16, gathers_a, gathers_b);
    codes.push_back(product::sm90_code(
        {product::sm90_grouped_configs(operands)[static_cast<size_t>(config)], operands, {}, output}));
  };
  for (const int config : {0, 1, 2}) {
    add(true, false, config);
    add(false, true, config);
  }
  add(false, false, 0);
  add(false, true, 0, DType::kFloat32);
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kSm90{.name = "sm90_wgmma",
                                                .supports = supports_rows,
                                                .configs = configs<Product>,
                                                .heuristic = rows_heuristic,
                                                .run = run_rows,
                                                .source_hash = product::sm90_source_hash,
                                                .device_code = rows_device_code};
constinit const registry::Kernel<WeightGradient> kWeightSm90{.name = "sm90_wgmma",
                                                             .supports = supports_depth,
                                                             .configs = configs<WeightGradient>,
                                                             .heuristic = depth_heuristic,
                                                             .run = run_depth,
                                                             .source_hash = product::sm90_source_hash,
                                                             .device_code = depth_device_code};

}  // namespace kernel_pytorch::grouped_matmul
