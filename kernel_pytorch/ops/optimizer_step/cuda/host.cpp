// Host side of the step on the GPU: one launch for every 330 parameters, and a memset of the counter by which the last
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
constexpr int kMostConfigs = 4;
constexpr std::string_view kRuleNames[] = {"kAdamW", "kLion", "kSgd"};
constexpr std::string_view kStorageNames[] = {"kPlain", "kCompanded", "kDynamic"};
constexpr std::string_view kWeightBitsNames[] = {"kNone", "kCorrection", "kMaster"};

// What a kernel is compiled for.
struct Variant {
  Rule rule;
  Storage storage;
  DType dtype;
  bool has_narrow_states;  // plain, of 16 bits
  WeightBits weight_bits;
  bool has_maximum;

  int index() const {
    const int type =
        ((static_cast<int>(rule) * kStorages + static_cast<int>(storage)) * 3 + cuda_type_index(dtype)) * 2 +
        (has_narrow_states ? 1 : 0);
    return (type * 3 + static_cast<int>(weight_bits)) * 2 + (has_maximum ? 1 : 0);
  }
  DType state_type() const {
    return !has_narrow_states ? DType::kFloat32 : dtype == DType::kFloat32 ? DType::kBFloat16 : dtype;
  }
  int parameter_bytes() const { return static_cast<int>(size_of(dtype)); }
  int state_bytes() const { return storage == Storage::kPlain ? static_cast<int>(size_of(state_type())) : 1; }
};
constexpr int kVariants = kRules * kStorages * 3 * 2 * 3 * 2;

Variant variant_of(const Step& step) {
  const Parameter& first = step.parameters[0];
  const bool is_plain = step.storage == Storage::kPlain;
  return {.rule = step.rule,
          .storage = step.storage,
          .dtype = first.parameter.dtype,
          .has_narrow_states = is_plain && first.first.is_present() && first.first.dtype != DType::kFloat32,
          .weight_bits = first.correction.is_present() ? WeightBits::kCorrection
                         : first.master.is_present()   ? WeightBits::kMaster
                                                       : WeightBits::kNone,
          .has_maximum = first.maximum.is_present()};
}

struct StepConfig {
  int unit = 8;    // consecutive elements that a thread takes at once
  int blocks = 3;  // resident per multiprocessor
  int stages = 0;  // chunks of a block that are under way through shared memory; 0: one, in registers
};
constexpr auto kStepConfigFields = config_fields<StepConfig>(
    config_field<&StepConfig::unit>(), config_field<&StepConfig::blocks>(), config_field<&StepConfig::stages>());
constexpr ConfigFields fields_of(const StepConfig&) {
  return kStepConfigFields;
}
// There is a choice for what is used most; the rest is compiled once, with the registers that its units need. A unit of
// plain numbers is 16 bytes of the widest.
std::span<const StepConfig> configs_of(const Variant& variant) {
  static constexpr StepConfig kCoded[] = {{8, 4, 2}, {8, 3, 0}, {16, 2, 2}},
                              kWide[] = {{4, 4, 0}, {4, 3, 0}, {8, 2, 0}}, kNarrow[] = {{8, 3, 0}},
                              kLargeUnit[] = {{8, 2, 0}}, kSmallUnit[] = {{4, 3, 0}};
  const bool is_plain = variant.storage == Storage::kPlain, is_narrow = variant.parameter_bytes() == 2;
  const bool is_usual = variant.rule == Rule::kAdamW && !variant.has_maximum && variant.storage != Storage::kDynamic &&
                        variant.weight_bits != WeightBits::kMaster && variant.dtype != DType::kFloat16;
  const bool has_small_units = is_plain && !(is_narrow && variant.state_bytes() == 2);
  if (has_small_units && is_usual) return kWide;
  if (has_small_units) return kSmallUnit;
  if (!is_usual || !is_narrow) return kLargeUnit;
  if (is_plain) return kNarrow;
  return kCoded;
}

DeviceCode code_of(const Variant& variant, const StepConfig& config) {
  const std::string_view state =
      variant.storage == Storage::kPlain ? element_type_name(variant.state_type()) : "uint8_t";
  return {.source = kSource,
          .entry = concat(
              "kernel_pytorch::optimizer_step::step<kernel_pytorch::optimizer_step::Rule::",
              kRuleNames[static_cast<int>(variant.rule)], ", kernel_pytorch::optimizer_step::Storage::",
              kStorageNames[static_cast<int>(variant.storage)], ", ", element_type_name(variant.dtype), ", ", state,
              ", kernel_pytorch::optimizer_step::WeightBits::", kWeightBitsNames[static_cast<int>(variant.weight_bits)],
              ", ", bool_name(variant.has_maximum), ", ", config.unit, ", ", config.blocks, ", ", config.stages, ">"),
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

Entry entry_of(const Parameter& one, int unit, int64_t random_start) {
  const auto has_units = [&](const TensorView& view) {
    return is_aligned(view, std::min<int64_t>(unit * size_of(view.dtype), 16));
  };
  return {.parameter = one.parameter.data,
          .gradient = one.gradient.data,
          .weight_bits = one.correction.is_present() ? one.correction.data : one.master.data,
          .first = one.first.data,
          .second = one.second.data,
          .maximum = one.maximum.data,
          .first_scale = one.first_scale.as<float>(),
          .second_scale = one.second_scale.as<float>(),
          .step = one.step.as<float>(),
          .elements = one.parameter.element_count(),
          .random_block = static_cast<uint64_t>(random_start),
          .chunk_end = 0,
          .is_aligned = has_units(one.parameter) && has_units(one.gradient) && has_units(one.correction) &&
                        has_units(one.master) && has_units(one.first) && has_units(one.second) &&
                        has_units(one.maximum)};
}

void run(const Step& step, int config, Context& context) {
  static const std::string kLabel = "optimizer_step";
  static KernelTable<kVariants * kMostConfigs> table;
  if (step.parameters.empty()) return;
  const Variant variant = variant_of(step);
  const StepConfig& chosen = configs_of(variant)[config];
  const int unit = chosen.unit;
  CUkern_st* kernel =
      table.get(variant.index() * kMostConfigs + config, context, [&] { return code_of(variant, chosen); });
  const int64_t chunk_elements = int64_t{kThreads} * unit,
                resident = int64_t{context.info->cuda.multiprocessors} * chosen.blocks;
  const std::vector<int64_t> starts = random_starts(step);
  const size_t launches = (step.parameters.size() + kMaxParameters - 1) / kMaxParameters;
  auto* arrived = static_cast<uint32_t*>(context.scratch->allocate(launches * sizeof(uint32_t)));
  cuda_device::fill_bytes(context.info->device.index, arrived, 0, launches * sizeof(uint32_t), context.stream);
  Arguments arguments{};
  arguments.seed = step.seed.as<const int64_t>();
  arguments.lr_value = step.lr_tensor.as<const float>();
  arguments.grad_scale = step.grad_scale.as<const float>();
  arguments.found_inf = step.found_inf.as<const float>();
  arguments.total_norm = step.total_norm.as<const float>();
  arguments.rates = rates_of(step);
  for (size_t launch = 0; launch < launches; ++launch) {
    const size_t begin = launch * kMaxParameters, end = std::min(begin + kMaxParameters, step.parameters.size());
    int64_t chunks = 0;
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = arguments.entries[i - begin] = entry_of(step.parameters[i], unit, starts[i]);
      chunks += divide_up(entry.elements, chunk_elements);
      KP_CHECK(chunks < int64_t{1} << 31, "optimizer_step: the list has more than 2^31 chunks of ", chunk_elements,
               " elements; split it");
      entry.chunk_end = static_cast<int32_t>(chunks);
    }
    arguments.count = static_cast<int32_t>(end - begin);
    arguments.arrived = arrived + launch;
    const int64_t blocks = std::clamp<int64_t>(chunks, 1, resident);
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(blocks);
    shape.block_x = kThreads;
    shape.shared_bytes = static_cast<unsigned>(
        chosen.stages * staged_bytes(variant.rule, variant.storage, variant.parameter_bytes(), variant.state_bytes(),
                                     variant.weight_bits, variant.has_maximum, unit));
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  }
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

// What check() lets through.
bool is_possible(const Variant& variant) {
  const bool is_narrow = variant.dtype != DType::kFloat32, is_plain = variant.storage == Storage::kPlain;
  if (variant.weight_bits == WeightBits::kCorrection) {
    const bool may_have_maximum = variant.rule == Rule::kAdamW && is_plain;
    return variant.dtype == DType::kBFloat16 && !variant.has_narrow_states &&
           (may_have_maximum || !variant.has_maximum);
  }
  if (variant.weight_bits == WeightBits::kMaster && !is_narrow) return false;
  const bool is_usual = variant.weight_bits == WeightBits::kNone && !variant.has_maximum && !variant.has_narrow_states;
  return is_usual || (variant.rule == Rule::kAdamW && is_plain);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int index = 0; index < kVariants; ++index) {
    const Variant variant{.rule = static_cast<Rule>(index / 108),
                          .storage = static_cast<Storage>(index / 36 % 3),
                          .dtype = kCudaTypes[index / 12 % 3],
                          .has_narrow_states = index / 6 % 2 != 0,
                          .weight_bits = static_cast<WeightBits>(index / 2 % 3),
                          .has_maximum = index % 2 != 0};
    if (!is_possible(variant)) continue;
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
