// Host side of the FP8 product on Hopper: scales of tensors and rows at the end of a tile, those of blocks after every
// 128 of k, where accurate sums leave the tensor core's accumulator too.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

using product::Sm90Epilogue;
using product::Sm90Scaling;
using product::Sm90Sizes;

constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kMisaligned = "rows of a, b or the output do not begin at multiples of 16 bytes";
constexpr const char* kOtherBias = "the bias is neither fp32 nor of the output's type";
constexpr const char* kFarScales = "scales lie 2^31 elements or more apart";

Sm90Sizes sm90_sizes(const Product& problem) {
  return {1, problem.a.sizes[0], problem.b.sizes[0], problem.a.sizes[1]};
}

bool is_far(const TensorView& scale) {
  const int64_t last =
      std::max<int64_t>(scale.sizes[0], 1) * scale.strides[0] + std::max<int64_t>(scale.sizes[1], 1) * scale.strides[1];
  return scale.strides[0] < 0 || scale.strides[1] < 0 || last > std::numeric_limits<int32_t>::max();
}

// Scales of 128 rows each count as blocks even where k has a single one.
bool has_blocks(const Product& problem) {
  return is_blocked(problem) || scaling_of_a(problem) == Scaling::k128x128 ||
         scaling_of_b(problem) == Scaling::k128x128;
}

Sm90Scaling sm90_scaling(const Product& problem) {
  const Scaling of_b = scaling_of_b(problem);
  if (has_blocks(problem)) {
    return of_b == Scaling::k128x128 || of_b == Scaling::kTensor ? Sm90Scaling::kBlocks : Sm90Scaling::kThinBlocks;
  }
  return of_b == Scaling::kTensor && scaling_of_a(problem) == Scaling::kTensor ? Sm90Scaling::kTensor
                                                                               : Sm90Scaling::kRows;
}

std::span<const product::Sm90Config> configs_of(const Product& problem) {
  const bool blocks = has_blocks(problem), promoted = problem.accurate || blocks;
  const std::span<const product::Sm90Config> all = product::sm90_configs(promoted, blocks);
  // One-byte outputs leave in boxes of 128 columns, of which 192 are not a multiple.
  return promoted && size_of(problem.output.dtype) == 1 ? all.subspan(1) : all;
}

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  const Sm90Sizes sizes = sm90_sizes(problem);
  if (sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return registry::Support::no(kNothing);
  if (!has_aligned_rows(problem.a) || !has_aligned_rows(problem.b) || !has_aligned_rows(problem.output)) {
    return registry::Support::no(kMisaligned);
  }
  const bool takes_bias =
      !problem.bias.is_present() || problem.bias.dtype == DType::kFloat32 || problem.bias.dtype == problem.output.dtype;
  if (!takes_bias) return registry::Support::no(kOtherBias);
  if (is_far(problem.scale_a) || is_far(problem.scale_b)) return registry::Support::no(kFarScales);
  return registry::Support::unless(product::sm90_size_obstacle(sizes));
}

std::vector<std::string> configs(const Product& problem, const DeviceInfo&) {
  return config_texts(configs_of(problem));
}

int heuristic(const Product& problem, const DeviceInfo& device) {
  return product::sm90_heuristic(configs_of(problem), sm90_sizes(problem), 1, device.cuda.multiprocessors);
}

TensorView with_batch(const TensorView& matrix) {
  TensorView view = matrix;
  view.rank = 3;
  view.sizes[2] = matrix.sizes[1];
  view.strides[2] = 1;
  view.sizes[1] = matrix.sizes[0];
  view.strides[1] = matrix.strides[0];
  view.sizes[0] = 1;
  view.strides[0] = matrix.strides[0] * matrix.sizes[0];
  return view;
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "scaled_matmul sm90";
  const Sm90Epilogue epilogue = {.bias = problem.bias.is_present(),
                                 .float_bias = problem.bias.is_present() && problem.bias.dtype != problem.output.dtype,
                                 .scaling = sm90_scaling(problem),
                                 .promoted = problem.accurate || has_blocks(problem),
                                 .amax = problem.amax.is_present()};
  const product::Sm90Variant variant = {
      .config = configs_of(problem)[static_cast<size_t>(config)],
      .operands = {product::sm90_type(problem.a.dtype), product::sm90_type(problem.b.dtype), false, false},
      .epilogue = epilogue,
      .output = problem.output.dtype};
  const ScaleLayout of_a(problem.scale_a, problem.a.sizes[0]), of_b(problem.scale_b, problem.b.sizes[0]);
  product::Sm90Arguments arguments{};
  arguments.alpha = 1;
  arguments.bias = problem.bias.data;
  arguments.scale_a = of_a.data;
  arguments.scale_b = of_b.data;
  arguments.scale_a_row = static_cast<int32_t>(of_a.row_stride);
  arguments.scale_a_block = static_cast<int32_t>(of_a.block_stride);
  arguments.scale_b_row = static_cast<int32_t>(of_b.row_stride);
  arguments.scale_b_block = static_cast<int32_t>(of_b.block_stride);
  arguments.scale_a_shift = of_a.rows_each == kBlock ? 7 : 0;
  arguments.output_scale = problem.output_scale.is_present() ? problem.output_scale.as<const float>() : nullptr;
  arguments.amax = problem.amax.is_present() ? problem.amax.as<float>() : nullptr;
  product::sm90_launch(variant,
                       {.a = with_batch(problem.a),
                        .b = with_batch(problem.b),
                        .output = with_batch(problem.output),
                        .preactivation = {}},
                       sm90_sizes(problem), arguments, context, kLabel);
}

// What the recipes of training use: forward and gradients, fast, accurate and in blocks.
std::vector<DeviceCode> device_code() {
  using product::Sm90Type;
  std::vector<DeviceCode> codes;
  const auto add = [&](Sm90Type a, const Sm90Epilogue& epilogue, bool blocks, DType output = DType::kBFloat16,
                       size_t which = 0) {
    const product::Sm90Config& config = product::sm90_configs(epilogue.promoted, blocks)[which];
    codes.push_back(product::sm90_code({config, {a, Sm90Type::kFloat8E4M3, false, false}, epilogue, output}));
  };
  for (const Sm90Type a : {Sm90Type::kFloat8E4M3, Sm90Type::kFloat8E5M2}) {
    add(a, {.scaling = Sm90Scaling::kTensor}, false);
    add(a, {.scaling = Sm90Scaling::kRows}, false);
    add(a, {.scaling = Sm90Scaling::kTensor, .promoted = true}, false);
    add(a, {.scaling = Sm90Scaling::kBlocks, .promoted = true}, true);
  }
  add(Sm90Type::kFloat8E4M3, {.scaling = Sm90Scaling::kBlocks, .promoted = true}, true, DType::kBFloat16, 1);
  add(Sm90Type::kFloat8E4M3, {.scaling = Sm90Scaling::kThinBlocks, .promoted = true}, true, DType::kFloat32);
  add(Sm90Type::kFloat8E4M3, {.scaling = Sm90Scaling::kTensor, .amax = true}, false, DType::kFloat8E4M3);
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

}  // namespace kernel_pytorch::scaled_matmul
