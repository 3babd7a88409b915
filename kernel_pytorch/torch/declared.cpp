// torch.ops.kernel_pytorch.* of every declared op: schemas, arguments and outputs follow from the op's list of fields
// (ops/<op>/<op>.h). An op adds nothing here. Gradients and batching rules are Python's (python/kernel_pytorch/_ops).
#include <torch/csrc/stable/library.h>

#include <array>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/host_call.h"
#include "kernel_pytorch/torch/call.h"
#include "kernel_pytorch/torch/plan.h"

namespace kernel_pytorch::torch_ops {
namespace {

using registry::Declaration;

constexpr size_t kMaxTypes = 4;
constexpr size_t kMaxDeclarations = 160;  // torch takes plain functions without state: so many are compiled

const std::vector<Plan>& plans() {
  static const auto* all = [] {
    auto* made = new std::vector<Plan>;
    for (const Declaration& declaration : declarations()) made->push_back(plan_of(declaration));
    KP_INTERNAL_CHECK(made->size() <= kMaxDeclarations, made->size(), " ops are declared, raise kMaxDeclarations");
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

constexpr int64_t kMostBytes = int64_t{1} << 46;

class DeclaredCall final : public registry::ArgumentSource {
 public:
  DeclaredCall(const Plan& plan, const StableIValue* stack)
      : plan_(plan), stack_(stack), sizes_(plan.declaration->fields) {
    for (const Plan::Argument& argument : plan.tensors) {
      handles_.add(argument.is_optional ? from_stack<OptionalHandle>(argument.index).value_or(nullptr)
                                        : from_stack<Handle>(argument.index));
    }
    for (const Plan::Argument& argument : plan.lists) {
      auto& list = lists_.emplace_back();
      for (Handle handle : from_stack<std::vector<Handle>>(argument.index)) list.emplace_back(handle);
    }
  }

  // Everything that owns memory is taken off the stack before anything can be refused.
  void fill(void* arguments) override {
    for (const Plan::Argument& option : plan_.options) fill_option(option, arguments);
    for (size_t i = 0; i < plan_.types.size(); ++i) {
      types_[i] = from_stack<std::optional<int32_t>>(plan_.types[i].index);
    }
    if (unknown_choice_.field != nullptr) [[unlikely]]
      refuse_choice();
    for (size_t i = 0; i < plan_.tensors.size(); ++i) fill_tensor(i, arguments);
    for (size_t i = 0; i < plan_.lists.size(); ++i) fill_list(i, arguments);
    if (plan_.writes) check_memory(arguments);
    bind_sizes(arguments);
    for (const Plan::Output& output : plan_.outputs) fill_output(output, arguments);
    for (const Field* output : plan_.in_place) {
      output->tensor(arguments) = fields()[output->in_place].tensor(arguments);
    }
  }
  Context& context() override { return call_.context(); }
  void return_outputs(StableIValue* stack, uint64_t expected) { call_.return_outputs(stack, expected); }

 private:
  const Fields& fields() const { return plan_.declaration->fields; }
  template <class T>
  T from_stack(size_t index) const {
    return torch::stable::detail::to<T>(stack_[index]);
  }

  void fill_option(const Plan::Argument& option, void* arguments) {
    const Field& field = *option.field;
    const size_t index = option.index;
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
        field.value<std::string>(arguments) = text_of(stack_[index]);
        return;
      case FieldKind::kChoice:
        fill_choice(option, arguments);
        return;
      case FieldKind::kTensor:
      case FieldKind::kTensorList:
        KP_INTERNAL_CHECK(false, plan_.declaration->name, ": ", field.name, " is no option");
    }
  }

  void fill_choice(const Plan::Argument& option, void* arguments) {
    std::string given = text_of(stack_[option.index]);
    std::string_view choices = option.field->rules.choices;
    uint8_t place = 0;
    for (auto word = take_token(choices); !word.empty(); word = take_token(choices), ++place) {
      if (word != given) continue;
      option.field->value<uint8_t>(arguments) = place;
      return;
    }
    unknown_choice_ = option;
    unknown_word_ = std::move(given);
  }

  [[noreturn]] void refuse_choice() const {
    std::string known;
    std::string_view choices = unknown_choice_.field->rules.choices;
    for (auto word = take_token(choices); !word.empty(); word = take_token(choices)) {
      known += concat(known.empty() ? "" : ", ", word);
    }
    fail(ErrorCode::kInvalidArgument, ArgumentName{plan_.declaration->name, unknown_choice_.name}, " is \"",
         unknown_word_, "\"; known are ", known);
  }

  void fill_tensor(size_t index, void* arguments) {
    const Plan::Argument& argument = plan_.tensors[index];
    Tensor tensor = handles_.take(index);
    if (tensor.get() == nullptr) return;
    const ArgumentName name{plan_.declaration->name, argument.name};
    TensorView& view = argument.field->tensor(arguments);
    view = argument.is_updated ? view_of(tensor, name, true) : view_in(argument.field->rules.memory, tensor, name);
    const bool is_dense = view.rank == 0 || view.size(-1) <= 1 || view.stride(-1) == 1;
    if (!is_dense && argument.are_rows && !argument.is_updated && view.device.kind == DeviceKind::kCpu) {
      view = dense_view_of(tensor, name);
    }
    handles_.give_back(index, std::move(tensor));
    call_.found(view, name);
  }

  static TensorView view_in(MemoryLayout memory, Tensor& tensor, const ArgumentName& name) {
    switch (memory) {
      case MemoryLayout::kStrided:
        return view_of(tensor, name);
      case MemoryLayout::kDenseLast:
        return dense_view_of(tensor, name);
      case MemoryLayout::kContiguous:
      case MemoryLayout::kFlat:
        return parameter_view_of(tensor, name);
      case MemoryLayout::kMatrix:
        matrix_view_of(tensor, name);
        return view_of(tensor, name);
      case MemoryLayout::kRows:
        rows_view_of(tensor, name);
        return view_of(tensor, name);
    }
    return {};
  }

  void fill_list(size_t index, void* arguments) {
    const Plan::Argument& argument = plan_.lists[index];
    std::vector<TensorView>& views = argument.field->tensors(arguments);
    views.reserve(lists_[index].size());
    for (const Tensor& tensor : lists_[index]) {
      const ArgumentName name{plan_.declaration->name, argument.name, static_cast<int64_t>(views.size())};
      views.push_back(view_of(tensor, name, argument.is_updated));
      call_.found(views.back(), name);
    }
  }

  void check_memory(void* arguments) const {
    std::array<Memory, kMaxArguments> few;
    size_t count = 0;
    for (const Plan::Argument& argument : plan_.tensors) {
      const auto memory = memory_of(argument.field->tensor(arguments), argument.name, argument.is_updated);
      if (memory) few[count++] = *memory;
    }
    if (plan_.lists.empty()) return check_written_memory(plan_.declaration->name, {few.data(), count});
    std::vector<Memory> many(few.begin(), few.begin() + static_cast<int64_t>(count));
    for (const Plan::Argument& argument : plan_.lists) {
      const std::vector<TensorView>& views = argument.field->tensors(arguments);
      for (const TensorView& view : views) {
        const auto memory = memory_of(view, argument.name, argument.is_updated, &view - views.data());
        if (memory) many.push_back(*memory);
      }
    }
    check_written_memory(plan_.declaration->name, many);
  }

  // Before tensors become flat, and after all are known: one of them may pick the shapes of others.
  void bind_sizes(void* arguments) {
    if (plan_.binds) sizes_.bind_options(arguments);
    for (const Plan::Argument& argument : plan_.tensors) {
      TensorView& view = argument.field->tensor(arguments);
      if (plan_.binds) sizes_.bind(*argument.field, view, arguments);
      if (argument.field->rules.memory == MemoryLayout::kFlat && view.is_present()) view = flat(view);
    }
  }

  static TensorView flat(const TensorView& view) {
    return contiguous_view(view.data, view.dtype, {view.element_count()}, view.device);
  }

  // An output that was not requested, or whose type or sizes are those of a tensor that is absent, is an empty tensor
  // and an absent view: what is wrong with it is the op's to say.
  void fill_output(const Plan::Output& output, void* arguments) {
    const Field& field = *output.field;
    const bool has_cause = field.when < 0 || fields()[field.when].tensor(arguments).is_present();
    const auto type = declared_type(fields(), field, arguments);
    const bool is_made = is_wanted(output) && has_cause && type;
    if (is_made && output.same_as != nullptr) {
      const TensorView view =
          call_.output(output.same_as->tensor(arguments).shape(), chosen_type(output).value_or(*type));
      field.tensor(arguments) = field.rules.memory == MemoryLayout::kFlat ? flat(view) : view;
      return;
    }
    const auto shape = is_made ? sizes_.shape_of(field, arguments) : std::nullopt;
    if (!shape) {
      const int64_t no_elements[] = {0};
      const bool has_own_type = type && field.type_rule != TypeRule::kOfField;
      call_.output(no_elements, has_own_type ? *type : registry::leading_input(fields()).tensor(arguments).dtype);
      return;
    }
    TensorView like = *shape;
    like.dtype = chosen_type(output).value_or(*type);
    check_size(field, like);
    const TensorView view = call_.output(like);
    field.tensor(arguments) = field.rules.memory == MemoryLayout::kFlat ? flat(view) : view;
  }

  // Outputs are allocated before the op checks its arguments, and a number among those may be any.
  void check_size(const Field& field, const TensorView& like) const {
    int64_t bytes = static_cast<int64_t>(size_of(like.dtype));
    bool is_possible = true;
    for (const int64_t size : like.shape()) {
      is_possible = is_possible && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
    }
    KP_CHECK(is_possible && bytes <= kMostBytes, plan_.declaration->name, ": ", field.name, " would have shape ",
             shape_text(like.shape()), ", which no memory holds; check the sizes that were given as numbers");
  }

  bool is_wanted(const Plan::Output& output) const {
    for (const int8_t flag : output.wanted) {
      if (flag >= 0 && !from_stack<bool>(static_cast<size_t>(flag))) return false;
    }
    return true;
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
  std::vector<std::vector<Tensor>> lists_;
  Call call_;
  DimensionSizes sizes_;
  std::array<std::optional<int32_t>, kMaxTypes> types_{};
  Plan::Argument unknown_choice_{};
  std::string unknown_word_;
};

void run(const Plan& plan, StableIValue* stack, uint64_t output_count) {
  DeclaredCall call(plan, stack);
  at_border([&] {
    registry::call_declared(*plan.declaration, call);
    call.return_outputs(stack, output_count);
  });
}

// Set before torch knows of any entry.
const Plan* first_plan = nullptr;

template <size_t kIndex>
void entry(StableIValue* stack, uint64_t, uint64_t output_count) {
  run(first_plan[kIndex], stack, output_count);
}

using Entry = void (*)(StableIValue*, uint64_t, uint64_t);
template <size_t... kIndex>
constexpr std::array<Entry, sizeof...(kIndex)> entries(std::index_sequence<kIndex...>) {
  return {entry<kIndex>...};
}

// NAME_forward once more, as an overload that Python gives no gradient: what a node of autograd calls, without a guard
// around the call and without a gradient's Python inside compiled graphs.
constexpr std::string_view kPlain = ".plain";
bool has_plain(const Declaration& declaration) {
  return declaration.name.ends_with("_forward");
}

void define(torch::stable::detail::StableLibrary& library) {
  first_plan = plans().data();
  for (const Plan& plan : plans()) {
    std::string schema = registry::schema_of(*plan.declaration);
    library.def(schema.c_str());
    if (has_plain(*plan.declaration)) library.def(schema.insert(plan.declaration->name.size(), kPlain).c_str());
  }
}

void implement(torch::stable::detail::StableLibrary& library) {
  static constexpr auto kEntries = entries(std::make_index_sequence<kMaxDeclarations>());
  first_plan = plans().data();
  for (size_t i = 0; i < plans().size(); ++i) {
    const Declaration& declaration = *plans()[i].declaration;
    library.impl(std::string(declaration.name).c_str(), kEntries[i]);
    if (has_plain(declaration)) library.impl(concat(declaration.name, kPlain).c_str(), kEntries[i]);
  }
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
