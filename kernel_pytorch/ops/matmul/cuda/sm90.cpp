// Host side of the product of 16-bit matrices on Hopper: what it takes, and how a problem becomes the arguments of the
// kernel that ops/engines/gemm/sm90/host.h launches. The sums over a's rows are a launch of their own.
#include <string>
#include <vector>

#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/matmul/cuda/row_sums.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

using product::Sm90Epilogue;
using product::Sm90Form;
using product::Sm90Sizes;
using product::Sm90Variant;

constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kMisaligned = "rows of a matrix do not begin at multiples of 16 bytes";
constexpr const char* kSpreadPreactivation = "writes no preactivation beside the gradient of pairs";

constexpr const char* kSeparateUp = "needs columns of b and up that lie along k, at equal strides, and one product";
constexpr const char* kFarUp = "b and up are a terabyte apart, beyond what the copy engine can address";

Sm90Sizes sm90_sizes(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  return {sizes.batch, sizes.m, sizes.n, sizes.k};
}

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (size_of(problem.a.dtype) != 2) return registry::Support::no(kNeeds16Bit);
  const Sm90Sizes sizes = sm90_sizes(problem);
  if (sizes.batch == 0 || sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return registry::Support::no(kNothing);
  for (const TensorView* view : {&problem.a, &problem.b, &problem.up, &problem.output, &problem.preactivation,
                                 &problem.residual, &problem.saved}) {
    if (!has_aligned_lines(*view)) return registry::Support::no(kMisaligned);
  }
  if (problem.form == Form::kGatedGradient && problem.preactivation.is_present()) {
    return registry::Support::no(kSpreadPreactivation);
  }
  if (problem.up.is_present() && (is_row_major(problem.b) || sizes.batch != 1 || !is_like_b(problem.up, problem))) {
    return registry::Support::no(kSeparateUp);
  }
  if (problem.up.is_present() && is_far(problem)) return registry::Support::no(kFarUp);
  return registry::Support::unless(product::sm90_size_obstacle(sizes));
}

std::span<const product::Sm90Config> configs_of(const Product& problem) {
  const bool is_gated = problem.up.is_present() || problem.form == Form::kGated;
  return product::sm90_configs(false, false, !is_gated);
}

std::vector<std::string> configs(const Product& problem, const DeviceInfo&) {
  return config_texts(configs_of(problem));
}

int heuristic(const Product& problem, const DeviceInfo& device) {
  return product::sm90_heuristic(configs_of(problem), sm90_sizes(problem), 2, device.cuda.multiprocessors);
}

bool is_other_type(const TensorView& view, const Product& problem) {
  return view.is_present() && view.dtype != problem.output.dtype;
}

bool has_whole_vectors(const TensorView& view) {
  return !view.is_present() || view.sizes[2] % 8 == 0;
}

Sm90Variant variant_of(const Product& problem, int config) {
  const product::Sm90Type type = product::sm90_type(problem.a.dtype);
  const Sm90Epilogue epilogue = {
      .form = problem.up.is_present() ? Sm90Form::kGated : static_cast<Sm90Form>(problem.form),
      .kind = problem.activation,
      .bias = problem.bias.is_present(),
      .residual = problem.residual.is_present(),
      .preactivation = problem.preactivation.is_present(),
      .float_bias = is_other_type(problem.bias, problem),
      .float_residual = is_other_type(problem.residual, problem),
      .float_saved = is_other_type(problem.saved, problem),
      .whole_vectors = (problem.residual.is_present() || problem.saved.is_present()) &&
                       has_whole_vectors(problem.residual) && has_whole_vectors(problem.saved)};
  return {.config = configs_of(problem)[static_cast<size_t>(config)],
          .operands = {type, type, !is_row_major(problem.a), is_row_major(problem.b), problem.up.is_present()},
          .epilogue = epilogue,
          .output = problem.output.dtype};
}

TensorView transposed(TensorView view) {
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

// [columns, 2, k]: a column of b and the one of up next to each other, the one at the lower address first.
TensorView pairs_of(const Product& problem) {
  const int64_t distance = up_distance(problem);
  TensorView pairs = distance < 0 ? problem.up : problem.b;
  pairs.sizes = {problem.b.sizes[2], 2, problem.b.sizes[1]};
  pairs.strides = {problem.b.strides[2], std::abs(distance), 1};
  return pairs;
}

product::Sm90Auxiliary auxiliary_of(const TensorView& view) {
  if (!view.is_present()) return {};
  return {.data = view.data, .batch_stride = view.strides[0], .row_stride = view.strides[1]};
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul sm90";
  if (problem.row_sums.is_present()) sum_rows(problem, context);
  product::Sm90Arguments arguments{};
  arguments.alpha = static_cast<float>(problem.alpha);
  arguments.beta = static_cast<float>(problem.beta);
  arguments.bias = problem.bias.data;
  arguments.residual = auxiliary_of(problem.residual);
  arguments.saved = auxiliary_of(problem.saved);
  const product::Sm90Tensors tensors = {.a = is_row_major(problem.a) ? problem.a : transposed(problem.a),
                                        .b = problem.up.is_present()   ? pairs_of(problem)
                                             : is_row_major(problem.b) ? problem.b
                                                                       : transposed(problem.b),
                                        .output = problem.output,
                                        .preactivation = problem.preactivation};
  arguments.gates_are_second = problem.up.is_present() && up_distance(problem) < 0;
  product::sm90_launch(variant_of(problem, config), tensors, sm90_sizes(problem), arguments, context, kLabel);
}

// The four transpositions, every tile, and the epilogues that models use; the rest is compiled when it is first asked
// for.
std::vector<DeviceCode> device_code() {
  const std::span<const product::Sm90Config> all = product::sm90_configs(false, false, true);
  const auto bf16 = product::Sm90Type::kBFloat16;
  std::vector<DeviceCode> codes = row_sums_device_code();
  const auto add = [&](const product::Sm90Config& config, bool a_rows, bool b_columns, const Sm90Epilogue& epilogue,
                       DType output = DType::kBFloat16) {
    codes.push_back(product::sm90_code({config, {bf16, bf16, a_rows, b_columns}, epilogue, output}));
  };
  for (const bool a_rows : {false, true}) {
    for (const bool b_columns : {false, true}) add(all[0], a_rows, b_columns, {});
  }
  for (const product::Sm90Config& config : all.subspan(1)) add(config, false, false, {});
  add(all.back(), true, true, {});
  add(all.back(), false, false, {.kind = Kind::kGelu, .bias = true});
  add(all.back(), false, false, {.bias = true, .residual = true, .whole_vectors = true});
  add(all[0], true, true, {.residual = true, .whole_vectors = true}, DType::kFloat32);
  add(all[0], false, false, {.kind = Kind::kGelu, .bias = true, .preactivation = true});
  add(all[0], false, false, {.residual = true, .whole_vectors = true});
  add(all[0], true, true, {.residual = true, .whole_vectors = true});
  add(all[0], false, false, {.form = Sm90Form::kGated, .kind = Kind::kSilu, .preactivation = true});
  codes.push_back(product::sm90_code({all[0],
                                      {.a = bf16, .b = bf16, .a_rows = false, .b_columns = false, .b_pairs = true},
                                      {.form = Sm90Form::kGated, .kind = Kind::kSilu},
                                      DType::kBFloat16}));
  add(all[0], false, true, {.form = Sm90Form::kGradient, .kind = Kind::kGelu, .whole_vectors = true});
  add(all[0], false, true, {.form = Sm90Form::kGatedGradient, .kind = Kind::kSilu, .whole_vectors = true});
  codes.push_back(product::sm90_code({all[0],
                                      {product::Sm90Type::kFloat16, product::Sm90Type::kFloat16, false, false},
                                      {.bias = true},
                                      DType::kFloat16}));
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

}  // namespace kernel_pytorch::matmul
