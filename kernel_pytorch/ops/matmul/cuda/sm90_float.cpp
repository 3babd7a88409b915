// Host side of the product of fp32 matrices on Hopper by wgmma of tf32. Precision tf32: a pass rounds both operands and
// puts them along k; wgmma by itself would cut them off. Full: the pass splits both into parts, the product adds three
// products of parts, and where a value is not finite or so large that a product may overflow, the product of
// cuda_mma_fp32 runs instead; both are launched and read on the device which of them it is.
#include <string>
#include <vector>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/split.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/matmul/cuda/tile.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/column_sums.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

using product::Sm90Epilogue;
using product::Sm90Form;
using product::Sm90Type;
using product::Sm90Variant;

constexpr const char* kWideFloat = "takes fp32";
constexpr const char* kWideFloatPrecision = "computes the precisions full and tf32";
constexpr const char* kWideFloatMisaligned = "rows of a matrix do not begin at multiples of 16 bytes";
constexpr const char* kWideFloatNothing = "there is nothing to multiply";
constexpr const char* kWideFloatSmall = "the product is so small that splitting its operands takes longer";
constexpr const char* kWideFloatRows = "there are more than eight million rows";
constexpr const char* kWideFloatBatchSums = "sums rows of one batch";
constexpr const char* kWideFloatSpread = "writes no preactivation beside the gradient of pairs";
constexpr double kLeastProducts = 1 << 24;  // of two numbers
constexpr int kCarefulEdge = 128;           // of the tiles of cuda_mma_fp32

bool is_full(const Product& problem) {
  return problem.precision == Precision::kFull;
}

TensorView turned(TensorView view) {
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

product::Sm90Sizes float_sizes(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  return {sizes.batch, sizes.m, sizes.n, is_full(problem) ? 2 * product::split_depth(sizes.k) : sizes.k};
}

registry::Support supports_sm90_float(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (problem.a.dtype != DType::kFloat32) return registry::Support::no(kWideFloat);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  if (!is_full(problem) && problem.precision != Precision::kTf32) return registry::Support::no(kWideFloatPrecision);
  const Sizes sizes = sizes_of(problem);
  if (sizes.batch == 0 || sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return registry::Support::no(kWideFloatNothing);
  for (const TensorView* view :
       {&problem.a, &problem.b, &problem.output, &problem.preactivation, &problem.residual, &problem.saved}) {
    if (!has_aligned_lines(*view)) return registry::Support::no(kWideFloatMisaligned);
  }
  if (problem.form == Form::kGatedGradient && problem.preactivation.is_present()) {
    return registry::Support::no(kWideFloatSpread);
  }
  if (problem.row_sums.is_present() && sizes.batch != 1) return registry::Support::no(kWideFloatBatchSums);
  if (is_full(problem) && double(sizes.batch) * double(sizes.m) * double(sizes.n) * double(sizes.k) < kLeastProducts) {
    return registry::Support::no(kWideFloatSmall);
  }
  if (sizes.m > int64_t{65535} * kCarefulEdge) return registry::Support::no(kWideFloatRows);
  for (const TensorView& view : {problem.a, turned(problem.b)}) {
    if (const char* obstacle = product::split_obstacle(view)) return registry::Support::no(obstacle);
  }
  return registry::Support::unless(product::sm90_size_obstacle(float_sizes(problem)));
}

std::span<const product::Sm90Config> float_configs_of(const Product& problem) {
  return is_full(problem) ? product::sm90_parts_configs() : product::sm90_configs(false, false, true);
}

std::vector<std::string> sm90_float_configs(const Product& problem, const DeviceInfo&) {
  return config_texts(float_configs_of(problem));
}

int sm90_float_heuristic(const Product& problem, const DeviceInfo& device) {
  return product::sm90_heuristic(float_configs_of(problem), float_sizes(problem), 4, device.cuda.multiprocessors);
}

Sm90Variant float_variant(const product::Sm90Config& config, bool parts, const Sm90Epilogue& epilogue) {
  const Sm90Type type = parts ? Sm90Type::kFloat32Parts : Sm90Type::kFloat32;
  Sm90Variant variant = {config, {type, type, false, false}, epilogue, DType::kFloat32};
  variant.epilogue.promoted = parts;
  return variant;
}

Sm90Variant float_variant_of(const Product& problem, int config) {
  return float_variant(float_configs_of(problem)[static_cast<size_t>(config)], is_full(problem),
                       {.form = static_cast<Sm90Form>(problem.form),
                        .kind = problem.activation,
                        .bias = problem.bias.is_present(),
                        .residual = problem.residual.is_present(),
                        .preactivation = problem.preactivation.is_present()});
}

product::Sm90Auxiliary float_auxiliary(const TensorView& view) {
  if (!view.is_present()) return {};
  return {.data = view.data, .batch_stride = view.strides[0], .row_stride = view.strides[1]};
}

void run_sm90_float(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul fp32 sm90", kCarefulLabel = "matmul fp32 mma";
  const Sizes sizes = sizes_of(problem);
  const bool parts = is_full(problem);
  int32_t* careful = nullptr;
  if (parts) {
    careful = static_cast<int32_t*>(context.scratch->allocate(sizeof(int32_t)));
    cuda_device::fill_bytes(context.info->device.index, careful, 0, sizeof(int32_t), context.stream);
  }
  ColumnSums sums;
  if (problem.row_sums.is_present()) {
    TensorView totals = problem.row_sums;
    totals.rank = 1;
    totals.sizes[0] = sizes.m;
    totals.strides[0] = 1;
    sums = allocate_column_sums(totals, {}, sizes.m, product::split_chunks(problem.a), context);
  }
  const auto ready = [&](const TensorView& view, float* row_sums) {
    return product::split_operand({view, parts, careful, row_sums}, context);
  };
  const product::Sm90Tensors tensors = {.a = ready(problem.a, static_cast<float*>(sums.partials[0])),
                                        .b = ready(turned(problem.b), nullptr),
                                        .output = problem.output,
                                        .preactivation = problem.preactivation};
  product::Sm90Arguments arguments{};
  arguments.alpha = static_cast<float>(problem.alpha);
  arguments.beta = static_cast<float>(problem.beta);
  arguments.bias = problem.bias.data;
  arguments.residual = float_auxiliary(problem.residual);
  arguments.saved = float_auxiliary(problem.saved);
  arguments.careful = careful;
  product::sm90_launch(float_variant_of(problem, config), tensors, float_sizes(problem), arguments, context, kLabel);
  if (parts) {
    product::TileArguments tile = tile_arguments(problem);
    tile.row_sums = {};
    tile.only_if = careful;
    product::float_launch({.edge = kCarefulEdge,
                           .across_a = !is_row_major(problem.a),
                           .across_b = is_row_major(problem.b),
                           .once = false},
                          sizes.batch, tile, context, kCarefulLabel);
  }
  if (problem.row_sums.is_present()) add_column_sums(sums, context);
}

// Every tile, and the epilogues that models use; the rest is compiled when it is first asked for.
std::vector<DeviceCode> sm90_float_device_code() {
  std::vector<DeviceCode> codes = product::split_device_code();
  for (const DeviceCode& code : column_sums_device_code()) codes.push_back(code);
  for (const bool parts : {false, true}) {
    const auto all = parts ? product::sm90_parts_configs() : product::sm90_configs(false, false, true);
    for (const product::Sm90Config& config : all) codes.push_back(product::sm90_code(float_variant(config, parts, {})));
    for (const Sm90Epilogue& epilogue : {Sm90Epilogue{.bias = true}, Sm90Epilogue{.residual = true},
                                         Sm90Epilogue{.kind = Kind::kGelu, .bias = true, .preactivation = true},
                                         Sm90Epilogue{.form = Sm90Form::kGradient, .kind = Kind::kGelu},
                                         Sm90Epilogue{.form = Sm90Form::kGated, .kind = Kind::kSilu},
                                         Sm90Epilogue{.form = Sm90Form::kGatedGradient, .kind = Kind::kSilu}}) {
      for (const product::Sm90Config& config : all.first(2)) {
        codes.push_back(product::sm90_code(float_variant(config, parts, epilogue)));
      }
    }
  }
  return codes;
}

uint64_t sm90_float_source_hash() {
  HashMixer mixer;
  mixer.add(product::sm90_source_hash());
  mixer.add(product::split_source_hash());
  mixer.add(product::float_source_hash());
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

}  // namespace

constinit const registry::Kernel<Product> kSm90Float{.name = "sm90_tf32",
                                                     .origin = registry::Origin::kOurs,
                                                     .supports = supports_sm90_float,
                                                     .configs = sm90_float_configs,
                                                     .heuristic = sm90_float_heuristic,
                                                     .run = run_sm90_float,
                                                     .source_hash = sm90_float_source_hash,
                                                     .device_code = sm90_float_device_code};

}  // namespace kernel_pytorch::matmul
