// Host side of AdamW on the GPU: one launch for every 400 parameters, and a memset of the counter by which the last
// block knows itself.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/adamw/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/adamw/rates.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::adamw {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/adamw/cuda/kernel.cuh";
constexpr int kMostConfigs = 3;

// Parameters' and averages' types that are compiled.
struct TypePair {
  DType parameter, average;
};
constexpr TypePair kTypePairs[] = {{DType::kFloat32, DType::kFloat32},  {DType::kFloat32, DType::kBFloat16},
                                   {DType::kBFloat16, DType::kFloat32}, {DType::kBFloat16, DType::kBFloat16},
                                   {DType::kFloat16, DType::kFloat32},  {DType::kFloat16, DType::kFloat16}};
constexpr int kPairs = std::size(kTypePairs);

int pair_of(const Parameter& one) {
  for (int i = 0; i < kPairs; ++i) {
    if (kTypePairs[i].parameter == one.parameter.dtype && kTypePairs[i].average == one.exp_avg.dtype) return i;
  }
  return -1;
}

struct UpdateConfig {
  int units = 2;  // that a thread takes
};
constexpr auto kUpdateConfigFields = config_fields<UpdateConfig>(config_field<&UpdateConfig::units>());
constexpr ConfigFields fields_of(const UpdateConfig&) {
  return kUpdateConfigFields;
}
// There is a choice for plain fp32; the rest is compiled for two units alone.
std::span<const UpdateConfig> configs_of(int pair, bool is_plain) {
  static constexpr UpdateConfig kConfigs[] = {{.units = 2}, {.units = 1}, {.units = 4}};
  return {kConfigs, static_cast<size_t>(is_plain && pair == 0 ? 3 : 1)};
}
bool is_plain(const Parameter& one) {
  return !one.master.is_present() && !one.max_exp_avg_sq.is_present();
}

DeviceCode code_of(int pair, int units, bool has_master, bool has_maximum) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::adamw::update<", element_type_name(kTypePairs[pair].parameter), ", ",
                          element_type_name(kTypePairs[pair].average), ", ", units, ", ", bool_name(has_master), ", ",
                          bool_name(has_maximum), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Step& step, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (!step.parameters.empty() && pair_of(step.parameters[0]) < 0) return registry::Support::no(kNeedsSmallFloat);
  return registry::Support::yes();
}

std::vector<std::string> configs(const Step& step, const DeviceInfo&) {
  if (step.parameters.empty()) return {};
  const Parameter& first = step.parameters[0];
  return config_texts(configs_of(pair_of(first), is_plain(first)));
}

bool has_units(const TensorView& view) {
  return is_aligned(view, kUnitElements * size_of(view.dtype));
}

Entry entry_of(const Parameter& one, int64_t random_start) {
  return {.parameter = one.parameter.data,
          .gradient = one.gradient.data,
          .exp_avg = one.exp_avg.data,
          .exp_avg_sq = one.exp_avg_sq.data,
          .max_exp_avg_sq = one.max_exp_avg_sq.data,
          .master = one.master.as<float>(),
          .step = one.step.as<float>(),
          .elements = one.parameter.element_count(),
          .random_block = static_cast<uint64_t>(random_start),
          .block_end = 0,
          .is_aligned = has_units(one.parameter) && has_units(one.gradient) && has_units(one.exp_avg) &&
                        has_units(one.exp_avg_sq) && has_units(one.max_exp_avg_sq) && has_units(one.master)};
}

void set_shared(const Step& step, Arguments& arguments) {
  arguments.seed = step.seed.as<const int64_t>();
  arguments.lr_value = step.lr_tensor.as<const float>();
  arguments.grad_scale = step.grad_scale.as<const float>();
  arguments.found_inf = step.found_inf.as<const float>();
  arguments.total_norm = step.total_norm.as<const float>();
  arguments.lr = static_cast<float>(step.lr);
  arguments.first = static_cast<float>(1 - step.beta1);
  arguments.second = static_cast<float>(1 - step.beta2);
  arguments.beta2 = static_cast<float>(step.beta2);
  arguments.log_beta1 = static_cast<float>(log_of_beta(step.beta1));
  arguments.log_beta2 = static_cast<float>(log_of_beta(step.beta2));
  arguments.eps = static_cast<float>(step.eps);
  arguments.weight_decay = static_cast<float>(step.weight_decay);
  arguments.max_norm = static_cast<float>(step.max_norm);
  arguments.maximize = step.maximize;
}

void run(const Step& step, int config, Context& context) {
  static const std::string kLabel = "adamw";
  static KernelTable<kPairs * kMostConfigs * 4> table;
  if (step.parameters.empty()) return;
  const Parameter& first = step.parameters[0];
  const bool has_master = first.master.is_present(), has_maximum = first.max_exp_avg_sq.is_present();
  const int pair = pair_of(first), units = configs_of(pair, is_plain(first))[config].units;
  CUkern_st* kernel = table.get(((pair * kMostConfigs + config) * 2 + has_master) * 2 + has_maximum, context,
                                [&] { return code_of(pair, units, has_master, has_maximum); });
  const int64_t block_elements = int64_t{kThreads} * kUnitElements * units;
  const std::vector<int64_t> starts = random_starts(step);
  const size_t launches = (step.parameters.size() + kMaxParameters - 1) / kMaxParameters;
  auto* arrived = static_cast<uint32_t*>(context.scratch->allocate(launches * sizeof(uint32_t)));
  cuda_device::fill_bytes(context.info->device.index, arrived, 0, launches * sizeof(uint32_t), context.stream);
  Arguments arguments{};
  set_shared(step, arguments);
  for (size_t launch = 0; launch < launches; ++launch) {
    const size_t begin = launch * kMaxParameters, end = std::min(begin + kMaxParameters, step.parameters.size());
    int64_t blocks = 0;
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = arguments.entries[i - begin] = entry_of(step.parameters[i], starts[i]);
      blocks += (entry.elements + block_elements - 1) / block_elements;
      KP_CHECK(blocks < int64_t{1} << 31, "adamw: the list has more than 2^31 blocks of ", block_elements,
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
  for (int pair = 0; pair < kPairs; ++pair) {
    for (bool has_master : {false, true}) {
      if (has_master && kTypePairs[pair].parameter == DType::kFloat32) continue;
      for (bool has_maximum : {false, true}) {
        for (const UpdateConfig& config : configs_of(pair, !has_master && !has_maximum)) {
          codes.push_back(code_of(pair, config.units, has_master, has_maximum));
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

}  // namespace kernel_pytorch::adamw
