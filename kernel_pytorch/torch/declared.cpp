// torch.ops.kernel_pytorch.* of every declared op: schemas, arguments and outputs follow from the op's list of fields
// (ops/declarations.h). An op adds nothing here. Gradients and batching rules are Python's
// (python/kernel_pytorch/_ops).
#include <torch/csrc/stable/library.h>

#include <array>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/declarations.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using registry::Argument;
using registry::ArgumentKind;
using registry::Declaration;

constexpr size_t kMaxArguments = 48;

// A declaration with what every call would otherwise look up again.
struct Plan {
  const Declaration* declaration = nullptr;
  registry::Signature signature;
  struct Output {
    const Field* field;
    int8_t wanted = -1, type = -1;  // arguments
  };
  std::vector<Output> outputs;
};

Plan plan_of(const Declaration& declaration) {
  Plan plan{&declaration, registry::signature_of(declaration), {}};
  const auto& arguments = plan.signature.arguments;
  KP_INTERNAL_CHECK(arguments.size() <= kMaxArguments, declaration.name, " has ", arguments.size(), " arguments");
  const auto argument_named = [&](ArgumentKind kind, std::string_view name) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].kind == kind && plan.signature.name_of(declaration.fields, arguments[i]) == name) {
        return static_cast<int8_t>(i);
      }
    }
    return int8_t{-1};
  };
  for (int8_t output : plan.signature.outputs) {
    const Field& field = declaration.fields.all[static_cast<size_t>(output)];
    plan.outputs.push_back({.field = &field,
                            .wanted = argument_named(ArgumentKind::kWanted, field.rules.wanted),
                            .type = argument_named(ArgumentKind::kType, field.rules.dtype_option)});
  }
  return plan;
}

const std::array<Plan, kDeclarationCount>& plans() {
  static const auto* all = [] {
    auto* made = new std::array<Plan, kDeclarationCount>;
    for (size_t i = 0; i < kDeclarationCount; ++i) (*made)[i] = plan_of(declarations()[i]);
    return made;
  }();
  return *all;
}

// What torch put on the stack for the tensors of one call, owned from the beginning: nothing that throws leaks it.
class Handles {
 public:
  Handles() = default;
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles() {
    for (size_t i = 0; i < count_; ++i) {
      if (handles_[i] != nullptr) aoti_torch_delete_tensor_object(handles_[i]);
    }
  }
  void add(Handle handle) { handles_[count_++] = handle; }
  Tensor take(size_t index) { return Tensor(std::exchange(handles_[index], nullptr)); }
  void give_back(size_t index, Tensor tensor) { handles_[index] = tensor.release(); }

 private:
  std::array<Handle, kMaxArguments> handles_;
  size_t count_ = 0;
};

class DeclaredCall final : public registry::ArgumentSource {
 public:
  DeclaredCall(const Plan& plan, const StableIValue* stack) : plan_(plan), stack_(stack) {
    const auto& arguments = plan.signature.arguments;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!is_tensor(arguments[i])) {
        handles_.add(nullptr);
      } else if (arguments[i].is_optional) {
        handles_.add(torch::stable::detail::to<OptionalHandle>(stack[i]).value_or(nullptr));
      } else {
        handles_.add(torch::stable::detail::to<Handle>(stack[i]));
      }
    }
  }

  // Everything that owns memory is taken off the stack before a tensor can be refused.
  void fill(void* arguments) override {
    const auto& signature = plan_.signature.arguments;
    for (size_t i = 0; i < signature.size(); ++i) {
      if (signature[i].kind == ArgumentKind::kField && !is_tensor(signature[i])) fill_option(i, arguments);
      if (signature[i].kind == ArgumentKind::kType) types_[i] = from_stack<std::optional<int32_t>>(i);
    }
    for (size_t i = 0; i < signature.size(); ++i) {
      if (is_tensor(signature[i])) fill_tensor(i, field_of(signature[i]), arguments);
    }
    for (const Plan::Output& output : plan_.outputs) fill_output(output, arguments);
  }
  Context& context() override { return call_.context(); }
  void return_outputs(StableIValue* stack, uint64_t expected) { call_.return_outputs(stack, expected); }

 private:
  const Field& field_of(const Argument& argument) const {
    return plan_.declaration->fields.all[static_cast<size_t>(argument.field)];
  }
  bool is_tensor(const Argument& argument) const {
    return argument.kind == ArgumentKind::kField && field_of(argument).is_tensor();
  }
  template <class T>
  T from_stack(size_t index) const {
    return torch::stable::detail::to<T>(stack_[index]);
  }

  void fill_option(size_t index, void* arguments) {
    const Field& field = field_of(plan_.signature.arguments[index]);
    switch (field.kind) {
      case FieldKind::kNumber:
        field.value<double>(arguments) = from_stack<double>(index);
        return;
      case FieldKind::kOptionalNumber:
        field.value<std::optional<double>>(arguments) =
            field.rules.required ? from_stack<double>(index) : from_stack<std::optional<double>>(index);
        return;
      case FieldKind::kInteger:
        field.value<int64_t>(arguments) = from_stack<int64_t>(index);
        return;
      case FieldKind::kOptionalInteger:
        field.value<std::optional<int64_t>>(arguments) = from_stack<std::optional<int64_t>>(index);
        return;
      case FieldKind::kFlag:
        field.value<bool>(arguments) = from_stack<bool>(index);
        return;
      case FieldKind::kText:
      case FieldKind::kChoice:
      case FieldKind::kTensor:
      case FieldKind::kTensorList:
        KP_INTERNAL_CHECK(false, plan_.declaration->name, ": ", field.name,
                          " is of a kind that torch's adapter has not");
    }
  }

  void fill_tensor(size_t index, const Field& field, void* arguments) {
    Tensor tensor = handles_.take(index);
    if (tensor.get() == nullptr) return;
    const ArgumentName name{plan_.declaration->name, field.name};
    TensorView& view = field.tensor(arguments);
    switch (field.rules.memory) {
      case MemoryLayout::kStrided:
        view = view_of(tensor, name, field.role == FieldRole::kUpdated);
        break;
      case MemoryLayout::kDenseLast:
        view = dense_view_of(tensor, name);
        break;
      case MemoryLayout::kContiguous:
        view = parameter_view_of(tensor, name);
        break;
      case MemoryLayout::kFlat:
        view = parameter_view_of(tensor, name);
        break;
    }
    handles_.give_back(index, std::move(tensor));
    call_.found(view, name);
    sizes_.bind(field, view);
    if (field.rules.memory == MemoryLayout::kFlat) view = flat(view);
  }

  static TensorView flat(const TensorView& view) {
    return contiguous_view(view.data, view.dtype, {view.element_count()}, view.device);
  }

  // An output that nobody asked for, or whose type or sizes are those of a tensor that is absent, is an empty tensor
  // and an absent view: what is wrong with it is the op's to say.
  void fill_output(const Plan::Output& output, void* arguments) {
    const Field& field = *output.field;
    const Fields& fields = plan_.declaration->fields;
    const bool is_wanted = output.wanted < 0 || from_stack<bool>(static_cast<size_t>(output.wanted));
    const bool has_cause = field.when < 0 || fields.all[static_cast<size_t>(field.when)].tensor(arguments).is_present();
    const auto type = declared_type(fields, field, arguments);
    const auto shape = is_wanted && has_cause && type ? sizes_.shape_of(field) : std::nullopt;
    if (!shape) {
      const int64_t no_elements[] = {0};
      call_.output(no_elements, registry::leading_input(fields).tensor(arguments).dtype);
      return;
    }
    TensorView like = *shape;
    like.dtype = chosen_type(output).value_or(*type);
    const TensorView view = call_.output(like);
    field.tensor(arguments) = field.rules.memory == MemoryLayout::kFlat ? flat(view) : view;
  }

  std::optional<DType> chosen_type(const Plan::Output& output) const {
    if (output.type < 0) return std::nullopt;
    const auto number = types_[static_cast<size_t>(output.type)];
    if (!number) return std::nullopt;
    return dtype_of(*number, {plan_.declaration->name, output.field->rules.dtype_option});
  }

  const Plan& plan_;
  const StableIValue* stack_;
  Handles handles_;
  Call call_;
  DimensionSizes sizes_;
  std::array<std::optional<int32_t>, kMaxArguments> types_{};
};

void run(const Plan& plan, StableIValue* stack, uint64_t output_count) {
  DeclaredCall call(plan, stack);
  at_border([&] {
    plan.declaration->call(call);
    call.return_outputs(stack, output_count);
  });
}

// torch takes a plain function without state: one for each declaration.
template <size_t kIndex>
void entry(StableIValue* stack, uint64_t, uint64_t output_count) {
  static const Plan& plan = plans()[kIndex];
  run(plan, stack, output_count);
}

void define(torch::stable::detail::StableLibrary& library) {
  for (const Declaration& declaration : declarations()) library.def(registry::schema_of(declaration).c_str());
}

void implement(torch::stable::detail::StableLibrary& library) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (library.impl(std::string(declarations()[kIndex].name).c_str(), entry<kIndex>), ...);
  }
  (std::make_index_sequence<kDeclarationCount>());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  implement(library);
}

}  // namespace kernel_pytorch::torch_ops
