// Host side of the step on the GPU: one launch for every 370 parameters, and a memset of the counter by which the last
// block knows itself.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::optimizer_step {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/optimizer_step/cuda/kernel.cuh";
constexpr int kMostConfigs = 2;
constexpr std::string_view kRuleNames[] = {"kAdamW", "kLion", "kSgd"};
constexpr std::string_view kStorageNames[] = {"kFloat", "kCompanded", "kDynamic"};

// What a kernel is compiled for.
struct Variant {
  Rule rule;
  Storage storage;
  DType dtype;
  bool has_correction;

  int index() const {
    return ((static_cast<int>(rule) * kStorages + static_cast<int>(storage)) * 3 + cuda_type_index(dtype)) * 2 +
           (has_correction ? 1 : 0);
  }
};
constexpr int kVariants = kRules * kStorages * 3 * 2;

Variant variant_of(const Step& step) {
  const Parameter& first = step.parameters[0];
  return {step.rule, step.storage, first.parameter.dtype, first.correction.is_present()};
}

struct StepConfig {
  int units = 1;  // that a thread takes
};
constexpr auto kStepConfigFields = config_fields<StepConfig>(config_field<&StepConfig::units>());
constexpr ConfigFields fields_of(const StepConfig&) {
  return kStepConfigFields;
}
// The dynamic map's tables are worth more elements a block; there is a choice where memory is the limit.
std::span<const StepConfig> configs_of(const Variant& variant) {
  static constexpr StepConfig kConfigs[] = {{.units = 1}, {.units = 2}}, kDynamic[] = {{.units = 2}};
  if (variant.storage == Storage::kDynamic) return kDynamic;
  return {kConfigs, variant.rule == Rule::kAdamW ? size_t{2} : size_t{1}};
}

DeviceCode code_of(const Variant& variant, int units) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::optimizer_step::step<kernel_pytorch::optimizer_step::Rule::",
                          kRuleNames[static_cast<int>(variant.rule)], ", kernel_pytorch::optimizer_step::Storage::",
                          kStorageNames[static_cast<int>(variant.storage)], ", ", element_type_name(variant.dtype),
                          ", ", bool_name(variant.has_correction), ", ", units, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Step&, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(device));
}

std::vector<std::string> configs(const Step& step, const DeviceInfo&) {
  if (step.parameters.empty()) return {};
  return config_texts(configs_of(variant_of(step)));
}

Entry entry_of(const Parameter& one, int unit) {
  const auto has_units = [&](const TensorView& view) {
    return is_aligned(view, std::min<int64_t>(unit * size_of(view.dtype), 16));
  };
  return {.parameter = one.parameter.data,
          .gradient = one.gradient.data,
          .correction = one.correction.as<uint8_t>(),
          .first = one.first.data,
          .second = one.second.data,
          .first_scale = one.first_scale.as<float>(),
          .second_scale = one.second_scale.as<float>(),
          .step = one.step.as<float>(),
          .elements = one.parameter.element_count(),
          .block_end = 0,
          .is_aligned = has_units(one.parameter) && has_units(one.gradient) && has_units(one.correction) &&
                        has_units(one.first) && has_units(one.second)};
}

void run(const Step& step, int config, Context& context) {
  static const std::string kLabel = "optimizer_step";
  static KernelTable<kVariants * kMostConfigs> table;
  if (step.parameters.empty()) return;
  const Variant variant = variant_of(step);
  const int units = configs_of(variant)[config].units, unit = unit_elements(step.storage);
  CUkern_st* kernel =
      table.get(variant.index() * kMostConfigs + config, context, [&] { return code_of(variant, units); });
  const int64_t block_elements = int64_t{kThreads} * unit * units;
  const size_t launches = (step.parameters.size() + kMaxParameters - 1) / kMaxParameters;
  auto* arrived = static_cast<uint32_t*>(context.scratch->allocate(launches * sizeof(uint32_t)));
  cuda_device::fill_bytes(context.info->device.index, arrived, 0, launches * sizeof(uint32_t), context.stream);
  Arguments arguments{};
  arguments.lr_value = step.lr_tensor.as<const float>();
  arguments.grad_scale = step.grad_scale.as<const float>();
  arguments.found_inf = step.found_inf.as<const float>();
  arguments.total_norm = step.total_norm.as<const float>();
  arguments.rates = rates_of(step);
  for (size_t launch = 0; launch < launches; ++launch) {
    const size_t begin = launch * kMaxParameters, end = std::min(begin + kMaxParameters, step.parameters.size());
    int64_t blocks = 0;
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = arguments.entries[i - begin] = entry_of(step.parameters[i], unit);
      blocks += (entry.elements + block_elements - 1) / block_elements;
      KP_CHECK(blocks < int64_t{1} << 31, "optimizer_step: the list has more than 2^31 blocks of ", block_elements,
               " elements; split it");
      entry.block_end = static_cast<int32_t>(blocks);
    }
    arguments.count = static_cast<int32_t>(end - begin);
    arguments.arrived = arrived + launch;
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(std::max<int64_t>(blocks, 1));
    shape.block_x = kThreads;
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  }
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (Rule rule : {Rule::kAdamW, Rule::kLion, Rule::kSgd}) {
    for (Storage storage : {Storage::kFloat, Storage::kCompanded, Storage::kDynamic}) {
      for (DType dtype : kCudaTypes) {
        for (bool has_correction : {false, true}) {
          if (has_correction && dtype != DType::kBFloat16) continue;
          const Variant variant{rule, storage, dtype, has_correction};
          for (const StepConfig& config : configs_of(variant)) codes.push_back(code_of(variant, config.units));
        }
      }
    }
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
