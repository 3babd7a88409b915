// The gradient through down and the gates as one wgmma product: grad_hidden never leaves the registers. A launch before
// it gives rows their weights, one after it adds up the gradients of weights.
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/moe_mlp/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::moe_mlp {
namespace {

constexpr const char* kRowsSource = "kernel_pytorch/ops/moe_mlp/cuda/kernel.cuh";
constexpr const char* kGate = "its gates are silu alone";
constexpr const char* kForm = "gates and ups are no halves of the columns";
constexpr const char* kBias = "a bias of down adds to the gradient of weights";
constexpr const char* kColumns = "columns of the activation are no multiple of 64";
constexpr const char* kSavedRows = "rows of a tensor do not begin at multiples of 16 bytes";

// Of the product's columns.
constexpr int64_t kBoxColumns = 64;

grouped_matmul::Product product_of(const HiddenBackward& problem) {
  return hidden_product(problem, problem.hidden);
}

registry::Support supports_hidden(const HiddenBackward& problem, const DeviceInfo& device) {
  if (problem.form != Form::kPackedGated) return registry::Support::no(kForm);
  if (problem.activation != Kind::kSilu) return registry::Support::no(kGate);
  if (problem.down_bias.is_present() || problem.row_weights.is_present()) return registry::Support::no(kBias);
  if (problem.hidden.sizes[1] % kBoxColumns != 0) return registry::Support::no(kColumns);
  if (!has_aligned_rows(problem.preactivation) || !has_aligned_rows(problem.grad_preactivation)) {
    return registry::Support::no(kSavedRows);
  }
  return grouped_matmul::kSm90.supports(product_of(problem), device);
}
std::vector<std::string> configs(const HiddenBackward& problem, const DeviceInfo& device) {
  return grouped_matmul::kSm90.configs(product_of(problem), device);
}
int heuristic(const HiddenBackward& problem, const DeviceInfo& device) {
  return grouped_matmul::kSm90.heuristic(product_of(problem), device);
}

DeviceCode row_code(std::string_view function) {
  return {.source = kRowsSource,
          .entry = concat("kernel_pytorch::moe_mlp::", function),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void launch_rows(std::string_view function, KernelTable<1>& table, const std::string& label,
                 RowWeightArguments& arguments, Context& context) {
  CUkern_st* kernel = table.get(0, context, [&] { return row_code(function); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.pairs, kThreads));
  shape.block_x = kThreads;
  shape.programmatic_dependent = true;
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void set_form(bool is_clamped, product::Sm90Epilogue& epilogue) {
  epilogue.form = product::Sm90Form::kHalvesGradient;
  epilogue.kind = Kind::kSilu;
  epilogue.preactivation = true;
  epilogue.whole_vectors = true;
  epilogue.clamped = is_clamped;
}

void run_hidden(const HiddenBackward& problem, int config, Context& context) {
  static const std::string kBefore = "moe_mlp weights of rows", kLabel = "moe_mlp hidden backward sm90",
                           kAfter = "moe_mlp gradients of weights";
  static KernelTable<1> before, after;
  const ScratchScope scope(context.scratch);
  product::Sm90Launch launch = grouped_matmul::sm90_launch_of(product_of(problem), config);
  set_form(problem.limit > 0, launch.variant.epilogue);
  const int64_t count = launch.sizes.m, tiles = divide_up(launch.sizes.n, launch.variant.config.tile_n);
  const auto floats = [&](int64_t size) {
    return static_cast<float*>(context.scratch->allocate(static_cast<size_t>(size) * sizeof(float)));
  };
  RowWeightArguments weights{.row_of_token = problem.row_of_token.as<const int32_t>(),
                             .weights = problem.weights.as<const float>(),
                             .row_weights = floats(count),
                             .row_sums = floats(count * tiles),
                             .grad_weights = problem.grad_weights.as<float>(),
                             .pairs = static_cast<int32_t>(count),
                             .tiles = static_cast<int32_t>(tiles)};
  launch_rows("spread_weights", before, kBefore, weights, context);
  launch.tensors.preactivation = product::sm90_batch_of_one(problem.grad_preactivation);
  launch.arguments.saved = {
      .data = problem.preactivation.data, .batch_stride = 0, .row_stride = problem.preactivation.strides[0]};
  product::Sm90Groups& groups = launch.arguments.groups;
  groups.preactivation = problem.grad_preactivation.data;
  groups.preactivation_stride = problem.grad_preactivation.strides[0];
  groups.limit = static_cast<float>(problem.limit);
  groups.slope = static_cast<float>(problem.slope);
  groups.row_weights = weights.row_weights;
  groups.row_sums = weights.row_sums;
  product::sm90_launch(launch.variant, launch.tensors, launch.sizes, launch.arguments, context, kLabel);
  launch_rows("collect_sums", after, kAfter, weights, context);
}

uint64_t source_hash() {
  return product::sm90_source_hash() ^ jit::source_hash(kRowsSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes = {row_code("spread_weights"), row_code("collect_sums")};
  const std::span<const product::Sm90Config> all = product::sm90_grouped_configs(product::Sm90Grouping::kRows);
  const auto add = [&](bool b_columns, bool is_clamped, size_t config) {
    product::Sm90Variant variant{.config = all[config],
                                 .operands = {.a = product::Sm90Type::kBFloat16,
                                              .b = product::Sm90Type::kBFloat16,
                                              .a_rows = false,
                                              .b_columns = b_columns,
                                              .grouping = product::Sm90Grouping::kRows,
                                              .gathers_a = true},
                                 .epilogue = {.grouped = true},
                                 .output = DType::kBFloat16};
    set_form(is_clamped, variant.epilogue);
    codes.push_back(product::sm90_code(variant));
  };
  for (const size_t config : {0, 1}) {
    for (const bool b_columns : {false, true}) add(b_columns, false, config);
  }
  add(true, true, 0);
  return codes;
}

}  // namespace

constinit const registry::Kernel<HiddenBackward> kHiddenBackwardSm90{.name = "sm90_wgmma",
                                                                     .supports = supports_hidden,
                                                                     .configs = configs,
                                                                     .heuristic = heuristic,
                                                                     .run = run_hidden,
                                                                     .source_hash = source_hash,
                                                                     .device_code = device_code};

}  // namespace kernel_pytorch::moe_mlp
