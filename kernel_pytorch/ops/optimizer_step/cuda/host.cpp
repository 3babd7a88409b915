// Host side of the step on GPUs of every kind.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/variant.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::optimizer_step {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/optimizer_step/cuda/kernel.cuh";

struct StepConfig {
  int blocks = 3;  // resident per multiprocessor
  int units = 0;   // of a thread in a block that leaves after them; 0: blocks stay and share the list out
};
constexpr auto kStepConfigFields =
    config_fields<StepConfig>(config_field<&StepConfig::blocks>(), config_field<&StepConfig::units>());
constexpr ConfigFields fields_of(const StepConfig&) {
  return kStepConfigFields;
}
constexpr StepConfig kCoded[] = {{3, 0}, {2, 0}}, kLarge[] = {{2, 0}}, kPlain[] = {{2, 4}, {3, 0}};
constexpr int kMostConfigs = std::size(kPlain);
// There is a choice for what is used most; the rest is compiled once, with the registers that its units need.
std::span<const StepConfig> configs_of(const Variant& variant) {
  const bool is_wide = variant.storage == Storage::kCompanded && variant.dtype == DType::kFloat32;
  const bool is_usual = variant.rule == Rule::kAdamW && !variant.has_maximum && variant.storage != Storage::kDynamic &&
                        variant.weight_bits != WeightBits::kMaster && variant.dtype != DType::kFloat16 && !is_wide;
  if (!is_usual) return kLarge;
  if (variant.storage == Storage::kPlain) return kPlain;
  return kCoded;
}

DeviceCode code_of(const Variant& variant, const StepConfig& config) {
  const std::string arguments = concat("<", variant.types(), ", ", bool_name(variant.has_maximum), ", ", config.blocks);
  return {.source = kSource,
          .entry = concat("kernel_pytorch::optimizer_step::step", config.units == 0 ? "" : "_once", arguments,
                          config.units == 0 ? std::string(">") : concat(", ", config.units, ">")),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Step& step, const DeviceInfo& device) {
  const DType dtype = step.parameters.empty() ? DType::kFloat32 : step.parameters[0].parameter.dtype;
  return registry::Support::unless(cuda_obstacle(dtype, device));
}

std::vector<std::string> configs(const Step& step, const DeviceInfo&) {
  if (step.parameters.empty()) return {};
  return config_texts(configs_of(variant_of(step)));
}

void run(const Step& step, int config, Context& context) {
  static const std::string kLabel = "optimizer_step";
  static KernelTable<kVariants * kMostConfigs> table;
  if (step.parameters.empty()) return;
  const Variant variant = variant_of(step);
  const StepConfig& numbers = configs_of(variant)[config];
  CUkern_st* kernel =
      table.get(variant.index() * kMostConfigs + config, context, [&] { return code_of(variant, numbers); });
  const int64_t resident = int64_t{context.info->cuda.multiprocessors} * numbers.blocks;
  const auto launch = [&](int64_t chunks, Arguments& arguments) {
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x =
        static_cast<unsigned>(std::max<int64_t>(numbers.units == 0 ? std::min(chunks, resident) : chunks, 1));
    shape.block_x = kThreads;
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  };
  const int chunk_elements = kThreads * variant.unit() * std::max(numbers.units, 1);
  launch_list(step, variant, {.elements = chunk_elements, .alignment = 0}, context, launch);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int index = 0; index < kVariants; ++index) {
    const Variant variant = variant_at(index);
    if (!variant.is_possible()) continue;
    for (const StepConfig& config : configs_of(variant)) codes.push_back(code_of(variant, config));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Step> kCuda{.name = "cuda",
                                             .supports = supports,
                                             .configs = configs,
                                             .run = run,
                                             .source_hash = source_hash,
                                             .device_code = device_code};

}  // namespace kernel_pytorch::optimizer_step
