// Host side of the FP8 grouped product on Hopper: the kernel of ops/grouped_matmul, with the scales of
// ops/scaled_matmul.
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/scaled_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

using product::Sm90Epilogue;
using product::Sm90Grouping;
using product::Sm90Scaling;
using product::Sm90Sizes;
using product::Sm90Type;

constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kMisaligned = "rows of a, b or the output do not begin at multiples of 16 bytes";
constexpr const char* kColumns = "columns of the output are no multiple of 16 bytes";
constexpr const char* kFarScales = "scales lie 2^31 elements or more apart";

Sm90Sizes sizes_of(const Product& problem) {
  return {1, rows_of(problem), problem.b.sizes[1], problem.b.sizes[2]};
}

// Of one matrix's scales, since that of groups is 64 bits wide.
bool is_far(const TensorView& scale, int first) {
  int64_t last = 0;
  for (int i = first; i < scale.rank; ++i) {
    if (scale.strides[i] < 0) return true;
    last += scale.sizes[i] * scale.strides[i];
  }
  return last > std::numeric_limits<int32_t>::max();
}

Sm90Scaling scaling_of(const Product& problem) {
  const bool has_thin_rows = rows_of_b_scale(problem) == 1 && problem.b.sizes[1] > 1;
  if (is_blocked(problem)) return has_thin_rows ? Sm90Scaling::kThinBlocks : Sm90Scaling::kBlocks;
  return has_thin_rows || problem.scale_a.sizes[0] > 1 ? Sm90Scaling::kRows : Sm90Scaling::kTensor;
}

bool is_promoted(const Product& problem) {
  return problem.accurate || is_blocked(problem);
}
product::Sm90Operands operands_of(Sm90Type a, Sm90Type b, bool gathers) {
  return {.a = a, .b = b, .a_rows = false, .b_columns = false, .grouping = Sm90Grouping::kRows, .gathers_a = gathers};
}
product::Sm90Operands operands_of(const Product& problem) {
  return operands_of(product::sm90_type(problem.a.dtype), product::sm90_type(problem.b.dtype),
                     problem.gather.is_present());
}
std::span<const product::Sm90Config> configs_of(const Product& problem) {
  return product::sm90_grouped_configs(operands_of(problem), is_promoted(problem), is_blocked(problem));
}

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  const Sm90Sizes sizes = sizes_of(problem);
  if (sizes.m == 0 || sizes.n == 0) return registry::Support::no(kNothing);
  if (!has_aligned_rows(problem.a) || !has_aligned_rows(problem.b, kVectorBytes, 2) ||
      !has_aligned_rows(problem.output)) {
    return registry::Support::no(kMisaligned);
  }
  if (sizes.n * size_of(problem.output.dtype) % kVectorBytes != 0) return registry::Support::no(kColumns);
  if (is_far(problem.scale_a, 0) || is_far(problem.scale_b, 1)) return registry::Support::no(kFarScales);
  return registry::Support::unless(product::sm90_size_obstacle(sizes));
}

std::vector<std::string> configs(const Product& problem, const DeviceInfo&) {
  return config_texts(configs_of(problem));
}
int heuristic(const Product& problem, const DeviceInfo& device) {
  return product::sm90_heuristic(configs_of(problem), sizes_of(problem), 1, device.cuda.multiprocessors);
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "scaled_grouped_matmul sm90";
  const TensorView &scale_a = problem.scale_a, &scale_b = problem.scale_b, &bias = problem.bias;
  const product::Sm90Variant variant = {
      .config = configs_of(problem)[static_cast<size_t>(config)],
      .operands = operands_of(problem),
      .epilogue = {.bias = bias.is_present(),
                   .float_bias = bias.is_present() && bias.dtype != problem.output.dtype,
                   .scaling = scaling_of(problem),
                   .promoted = is_promoted(problem),
                   .grouped = true},
      .output = problem.output.dtype};
  product::Sm90Arguments arguments{};
  arguments.alpha = arguments.beta = 1.0f;
  arguments.bias = bias.data;
  arguments.scale_a = scale_a.as<const float>();
  arguments.scale_b = scale_b.as<const float>();
  arguments.scale_a_row = static_cast<int32_t>(scale_a.strides[0]);
  arguments.scale_a_block = static_cast<int32_t>(scale_a.strides[1]);
  arguments.scale_b_row = static_cast<int32_t>(scale_b.strides[1]);
  arguments.scale_b_block = static_cast<int32_t>(scale_b.strides[2]);
  arguments.groups = {.ends = problem.offsets.as<const int32_t>(),
                      .gather_a = problem.gather.as<const int32_t>(),
                      .gather_b = nullptr,
                      .count = static_cast<int32_t>(problem.b.sizes[0]),
                      .rows = static_cast<int32_t>(rows_of(problem)),
                      .depth = static_cast<int32_t>(problem.b.sizes[2]),
                      .a = problem.a.data,
                      .b = nullptr,
                      .a_stride = problem.a.strides[0],
                      .b_stride = 0,
                      .output = problem.output.data,
                      .preactivation = nullptr,
                      .output_stride = problem.output.strides[0],
                      .preactivation_stride = 0,
                      .bias_stride = bias.is_present() ? bias.strides[0] : 0,
                      .scale_b_stride = scale_b.strides[0],
                      .limit = 0,
                      .slope = 0};
  product::sm90_launch(variant,
                       {.a = product::sm90_batch_of_one(problem.a),
                        .b = problem.b,
                        .output = product::sm90_batch_of_one(problem.output),
                        .preactivation = {}},
                       sizes_of(problem), arguments, context, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  const auto add = [&](bool gathers, const Sm90Epilogue& of_scaling, size_t which = 0) {
    const bool blocks = of_scaling.scaling == Sm90Scaling::kBlocks || of_scaling.scaling == Sm90Scaling::kThinBlocks;
    Sm90Epilogue epilogue = of_scaling;
    epilogue.grouped = true;
    const product::Sm90Operands operands = operands_of(Sm90Type::kFloat8E4M3, Sm90Type::kFloat8E4M3, gathers);
    codes.push_back(product::sm90_code({product::sm90_grouped_configs(operands, epilogue.promoted, blocks)[which],
                                        operands, epilogue, DType::kBFloat16}));
  };
  for (const bool gathers : {false, true}) {
    add(gathers, {.scaling = Sm90Scaling::kTensor});
    add(gathers, {.scaling = Sm90Scaling::kRows, .promoted = true});
    add(gathers, {.scaling = Sm90Scaling::kBlocks, .promoted = true});
    add(gathers, {.scaling = Sm90Scaling::kBlocks, .promoted = true}, 1);
  }
  add(false, {.scaling = Sm90Scaling::kThinBlocks, .promoted = true});
  add(false, {.bias = true, .scaling = Sm90Scaling::kRows, .promoted = true}, 1);
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kSm90{.name = "sm90_wgmma",
                                                .origin = registry::Origin::kOurs,
                                                .supports = supports,
                                                .configs = configs,
                                                .heuristic = heuristic,
                                                .run = run,
                                                .source_hash = product::sm90_source_hash,
                                                .device_code = device_code};

}  // namespace kernel_pytorch::scaled_grouped_matmul
