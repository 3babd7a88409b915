#include "kernel_pytorch/ops/optimizer_step/cuda/variant.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::optimizer_step {
namespace {

constexpr std::string_view kRuleNames[] = {"kAdamW", "kLion", "kSgd"};
constexpr std::string_view kStorageNames[] = {"kPlain", "kCompanded", "kDynamic"};
constexpr std::string_view kWeightBitsNames[] = {"kNone", "kCorrection", "kMaster"};

Entry entry_of(const Parameter& one, int unit, int alignment, int64_t random_start) {
  const auto has_units = [&](const TensorView& view) {
    return is_aligned(view, alignment != 0 ? alignment : std::min<int64_t>(unit * size_of(view.dtype), 16));
  };
  const auto has_scales = [&](const TensorView& view) { return alignment == 0 || is_aligned(view, alignment); };
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
                        has_units(one.maximum) && has_scales(one.first_scale) && has_scales(one.second_scale)};
}

}  // namespace

int Variant::index() const {
  const int type = ((static_cast<int>(rule) * kStorages + static_cast<int>(storage)) * 3 + cuda_type_index(dtype)) * 2 +
                   (has_narrow_states ? 1 : 0);
  return (type * 3 + static_cast<int>(weight_bits)) * 2 + (has_maximum ? 1 : 0);
}
Variant variant_at(int index) {
  return {.rule = static_cast<Rule>(index / 108),
          .storage = static_cast<Storage>(index / 36 % 3),
          .dtype = kCudaTypes[index / 12 % 3],
          .has_narrow_states = index / 6 % 2 != 0,
          .weight_bits = static_cast<WeightBits>(index / 2 % 3),
          .has_maximum = index % 2 != 0};
}
DType Variant::state_type() const {
  return !has_narrow_states ? DType::kFloat32 : dtype == DType::kFloat32 ? DType::kBFloat16 : dtype;
}
int Variant::state_bytes() const {
  return storage == Storage::kPlain ? static_cast<int>(size_of(state_type())) : 1;
}
int Variant::unit() const {
  return unit_elements(storage, static_cast<int>(size_of(dtype)), state_bytes());
}
bool Variant::is_possible() const {
  const bool is_narrow = dtype != DType::kFloat32, is_plain = storage == Storage::kPlain;
  if (weight_bits == WeightBits::kCorrection) {
    const bool may_have_maximum = rule == Rule::kAdamW && is_plain;
    return dtype == DType::kBFloat16 && !has_narrow_states && (may_have_maximum || !has_maximum);
  }
  if (weight_bits == WeightBits::kMaster && !is_narrow) return false;
  const bool is_usual = weight_bits == WeightBits::kNone && !has_maximum && !has_narrow_states;
  return is_usual || (rule == Rule::kAdamW && is_plain);
}
std::string Variant::types() const {
  const std::string_view state = storage == Storage::kPlain ? element_type_name(state_type()) : "uint8_t";
  return concat("kernel_pytorch::optimizer_step::Rule::", kRuleNames[static_cast<int>(rule)],
                ", kernel_pytorch::optimizer_step::Storage::", kStorageNames[static_cast<int>(storage)], ", ",
                element_type_name(dtype), ", ", state,
                ", kernel_pytorch::optimizer_step::WeightBits::", kWeightBitsNames[static_cast<int>(weight_bits)]);
}

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

void launch_list(const Step& step, const Variant& variant, Chunks chunks, Context& context,
                 const std::function<void(int64_t chunks, Arguments& arguments)>& launch) {
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
  for (size_t number = 0; number < launches; ++number) {
    const size_t begin = number * kMaxParameters, end = std::min(begin + kMaxParameters, step.parameters.size());
    int64_t count = 0;
    for (size_t i = begin; i < end; ++i) {
      Entry& entry = arguments.entries[i - begin] =
          entry_of(step.parameters[i], variant.unit(), chunks.alignment, starts[i]);
      count += divide_up(entry.elements, chunks.elements);
      KP_CHECK(count < int64_t{1} << 31, "optimizer_step: the list has more than 2^31 chunks of ", chunks.elements,
               " elements; split it");
      entry.chunk_end = static_cast<int32_t>(count);
    }
    arguments.count = static_cast<int32_t>(end - begin);
    arguments.arrived = arrived + number;
    launch(count, arguments);
  }
}

}  // namespace kernel_pytorch::optimizer_step
