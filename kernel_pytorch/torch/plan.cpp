#include "kernel_pytorch/torch/plan.h"

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::torch_ops {
namespace {

using registry::ArgumentKind;

// Nearly every output has the shape of an input: finding names and sizes in each call would cost a tenth of it.
const Field* same_shape(const Plan& plan, const Field& output) {
  if (output.shape_count != 1 || output.order_of >= 0) return nullptr;
  for (const Plan::Argument& argument : plan.tensors) {
    const bool is_plain = !argument.is_optional && argument.field->shape_count == 1 &&
                          argument.field->rules.memory != MemoryLayout::kFlat;
    // Only the first tensor with a shape: names are those of the first that has them.
    if (argument.field->shape_count == 0) continue;
    return is_plain && argument.field->rules.shape == output.rules.shape ? argument.field : nullptr;
  }
  return nullptr;
}

Plan::Output plan_output(const Plan& plan, const registry::Signature& signature, const registry::Output& output) {
  const Field& field = plan.declaration->fields[output.field];
  Plan::Output planned{.field = &field};
  std::string_view flags = output.is_always_made ? std::string_view() : field.rules.wanted;
  size_t count = 0;
  for (auto flag = take_token(flags); !flag.empty(); flag = take_token(flags)) {
    KP_INTERNAL_CHECK(count < kMaxFlags, plan.declaration->name, ": too many flags ask for ", output.name);
    planned.wanted[count++] = static_cast<int8_t>(signature.find(flag));
  }
  for (size_t i = 0; i < plan.types.size(); ++i) {
    if (plan.types[i].name == field.rules.dtype_option) planned.type = static_cast<int8_t>(i);
  }
  return planned;
}

}  // namespace

Plan plan_of(const registry::Declaration& declaration) {
  const registry::Signature signature = registry::signature_of(declaration);
  KP_INTERNAL_CHECK(signature.arguments.size() <= kMaxArguments, declaration.name, " has ", signature.arguments.size(),
                    " arguments");
  Plan plan;
  plan.declaration = &declaration;
  for (size_t i = 0; i < signature.arguments.size(); ++i) {
    const registry::Argument& given = signature.arguments[i];
    const Field& field = declaration.fields[given.field];
    const bool are_rows = field.rules.memory == MemoryLayout::kStrided && field.rules.shape == "... columns";
    const Plan::Argument argument{i, given.name, &field, given.is_optional, given.is_updated, are_rows};
    plan.writes |= given.is_updated;
    if (given.kind == ArgumentKind::kType) {
      plan.types.push_back(argument);
    } else if (given.kind == ArgumentKind::kField) {
      auto& kind = field.is_tensor() ? plan.tensors : field.kind == FieldKind::kTensorList ? plan.lists : plan.options;
      kind.push_back(argument);
    }
  }
  for (const registry::Output& output : signature.outputs) {
    plan.outputs.push_back(plan_output(plan, signature, output));
    plan.outputs.back().same_as = same_shape(plan, declaration.fields[output.field]);
    plan.binds |= plan.outputs.back().same_as == nullptr;
  }
  for (const int8_t output : signature.in_place) plan.in_place.push_back(&declaration.fields[output]);
  return plan;
}

}  // namespace kernel_pytorch::torch_ops
