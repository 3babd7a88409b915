// Host side of the sm90 step: AdamW, with what is trained with most.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/variant.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/optimizer_step/sm90/config_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::optimizer_step {
namespace sm90 {

inline constexpr auto kConfigFields =
    config_fields<Config>(config_field<&Config::units>(), config_field<&Config::stages>(),
                          config_field<&Config::blocks>(), config_field<&Config::sweeps>());
constexpr ConfigFields fields_of(const Config&) {
  return kConfigFields;
}

}  // namespace sm90

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/optimizer_step/sm90/kernel.cuh";
// The first is an H200's fastest of those in NOTES.md.
constexpr sm90::Config kWide[] = {{1, 4, 3, true}, {1, 4, 3, false}}, kNarrow[] = {{1, 6, 2, false}, {1, 4, 3, false}},
                       kCompanded[] = {{2, 3, 2, false}, {1, 4, 3, false}}, kDynamic[] = {{1, 4, 3, true}};
constexpr int kMostConfigs = std::size(kCompanded);

bool is_taken(const Variant& variant) {
  const bool is_wide = variant.storage != Storage::kPlain && variant.dtype == DType::kFloat32;
  return variant.rule == Rule::kAdamW && !variant.has_maximum && variant.dtype != DType::kFloat16 && !is_wide;
}
std::span<const sm90::Config> all_of(const Variant& variant) {
  if (variant.storage == Storage::kDynamic) return kDynamic;
  if (variant.storage == Storage::kCompanded) return kCompanded;
  if (variant.unit() == 4) return kWide;
  return kNarrow;
}
// There is a choice for what is used most.
std::span<const sm90::Config> configs_of(const Variant& variant) {
  const std::span<const sm90::Config> all = all_of(variant);
  const WeightBits usual = variant.storage == Storage::kCompanded ? WeightBits::kCorrection : WeightBits::kNone;
  const bool is_usual =
      variant.weight_bits == usual && (variant.dtype != DType::kFloat32 || !variant.has_narrow_states);
  return all.first(is_usual ? all.size() : 1);
}

sm90::ChunkLayout layout_of(const Variant& variant, const sm90::Config& config) {
  return sm90::chunk_layout(variant.storage, variant.weight_bits, static_cast<int>(size_of(variant.dtype)),
                            variant.state_bytes(), true, config.units);
}

DeviceCode code_of(const Variant& variant, const sm90::Config& config) {
  return {
      .source = kSource,
      .entry = concat("kernel_pytorch::optimizer_step::sm90::step<", variant.types(), ", ", device_text(config), ">"),
      .minimum_capability = 90,
      .architecture_specific = false};
}

registry::Support supports(const Step& step, const DeviceInfo& device) {
  if (step.parameters.empty()) return registry::Support::no("an empty list needs no kernel");
  if (const char* obstacle = cuda_obstacle(step.parameters[0].parameter.dtype, device)) {
    return registry::Support::no(obstacle);
  }
  if (const char* missing = feature_obstacle(device, CudaFeature::kBulkCopy)) return registry::Support::no(missing);
  const Variant variant = variant_of(step);
  if (!is_taken(variant)) {
    return registry::Support::no("takes adamw of bf16 or plain fp32 parameters, without amsgrad");
  }
  for (const sm90::Config& config : configs_of(variant)) {
    if (sm90::shared_bytes(layout_of(variant, config), variant.storage, config) > device.cuda.shared_bytes_per_block) {
      return registry::Support::no("keeps more in shared memory than this device's blocks have");
    }
  }
  return registry::Support::yes();
}

std::vector<std::string> configs(const Step& step, const DeviceInfo&) {
  return config_texts(configs_of(variant_of(step)));
}

void run(const Step& step, int config_index, Context& context) {
  static const std::string kLabel = "optimizer_step/sm90";
  static KernelTable<kVariants * kMostConfigs> table;
  const Variant variant = variant_of(step);
  const sm90::Config& config = configs_of(variant)[config_index];
  CUkern_st* kernel =
      table.get(variant.index() * kMostConfigs + config_index, context, [&] { return code_of(variant, config); });
  const sm90::ChunkLayout layout = layout_of(variant, config);
  const int64_t resident = int64_t{context.info->cuda.multiprocessors} * config.blocks;
  const auto launch = [&](int64_t chunks, Arguments& arguments) {
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(std::clamp<int64_t>(chunks, 1, resident));
    shape.block_x = kThreads + 32;
    shape.shared_bytes = static_cast<unsigned>(sm90::shared_bytes(layout, variant.storage, config));
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  };
  launch_list(step, variant, {.elements = layout.elements, .alignment = 16}, context, launch);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int index = 0; index < kVariants; ++index) {
    const Variant variant = variant_at(index);
    if (!variant.is_possible() || !is_taken(variant)) continue;
    for (const sm90::Config& config : configs_of(variant)) codes.push_back(code_of(variant, config));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Step> kSm90{.name = "sm90",
                                             .supports = supports,
                                             .configs = configs,
                                             .run = run,
                                             .source_hash = source_hash,
                                             .device_code = device_code};

}  // namespace kernel_pytorch::optimizer_step
