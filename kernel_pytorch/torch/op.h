// An op of torch from its schema and one function on views:
//
//   void infer(Call& call, const TensorView& x, const ParameterView& weight, double eps) {
//     rms_norm::forward({.x = x, .weight = weight, .eps = eps, .output = call.output_like(x)}, call.context());
//   }
//   using Ops = OpList<Op<"rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", infer>>;
//
// Arguments become views in the schema's order (an optional tensor that was not given is an absent view), outputs are
// returned in the order in which the call made them, errors of the core become torch's. CPU and CUDA share the
// function, since the core chooses by device. Schema and function are compared while compiling.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_pytorch/torch/border.h"
#include "kernel_pytorch/torch/context.h"
#include "kernel_pytorch/torch/schema.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {

// A small tensor that kernels want without strides; in the rare case of strides a contiguous copy. Not for `a!`.
struct ParameterView : TensorView {};
// A tensor of any strides but in its last dimension; where that is not dense, a contiguous copy. Not for `a!`.
struct DenseView : TensorView {};
// A matrix with its leading dimensions merged, as [batch, rows, columns], one of the last two strides 1; where that is
// not possible, a contiguous copy. Not for `a!`.
struct MatrixView : TensorView {
  TensorView given;  // with all its dimensions
};
// Rows with their leading dimensions merged, as [rows, columns], the last stride 1; likewise.
struct MergedRowsView : TensorView {
  TensorView given;
};

// What a call makes besides computing: its outputs, uninitialised and contiguous on the call's device, and its context.
// The device is that of all tensors given.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  TensorView output(std::span<const int64_t> sizes, DType dtype);
  TensorView output(const TensorView& like);  // its sizes, strides and type
  TensorView output_like(const TensorView& view) { return output(view.shape(), view.dtype); }
  TensorView output_like(const TensorView& view, std::optional<DType> dtype) {
    return output(view.shape(), dtype.value_or(view.dtype));
  }
  // An output that may not be asked for. The stand-in is an empty tensor of `fallback`'s type and an absent view;
  // asking for one like an absent tensor yields it as well, the core says what is wrong with the rest.
  TensorView output_like_if(bool wanted, const TensorView& view, const TensorView& fallback);

  Context& context() { return context_ ? *context_ : context_.emplace(device_); }

  // For Op alone. Throws where the tensors of a call are on several devices.
  void found(const TensorView& view, const ArgumentName& name) {
    if (!view.is_present()) return;
    if (first_.argument.empty()) device_ = view.device, first_ = name;
    if (view.device != device_) [[unlikely]]
      fail_on_two_devices(view, name);
  }
  void return_outputs(StableIValue* stack, uint64_t expected);

 private:
  [[noreturn]] void fail_on_two_devices(const TensorView& view, const ArgumentName& name) const;

  static constexpr size_t kMaxOutputs = 8;
  Device device_;
  ArgumentName first_;  // the argument whose device it is
  std::optional<TorchContext> context_;
  std::array<Handle, kMaxOutputs> outputs_{};
  size_t output_count_ = 0;
};

// The memory of a tensor of a call: of an argument, or of an entry of one that is a list.
struct Memory {
  uintptr_t begin;
  uintptr_t end;
  const TensorView* view;
  std::string_view argument;
  bool is_written;
  int64_t index;  // in its list, or -1
};

// Nothing where the tensor has no elements.
inline std::optional<Memory> memory_of(const TensorView& view, std::string_view argument, bool is_written,
                                       int64_t index = -1) {
  const int64_t elements = span_elements(view);
  if (elements == 0) return std::nullopt;
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  return Memory{begin, begin + static_cast<uintptr_t>(elements * size_of(view.dtype)), &view, argument, is_written,
                index};
}

// Throws where memory that the op writes belongs to a second element or to a second tensor of the call: a kernel
// promises nothing there, not even for equal views. Sorts what it is given.
void check_written_memory(std::string_view op, std::span<Memory> memories);

// The memories of all tensors of a call; on the stack if the call has no lists.
template <size_t kCount, bool kHasLists>
class Memories {
 public:
  template <class T>
  void add(const T& value, const SchemaArgument& argument) {
    if constexpr (std::is_base_of_v<TensorView, T>) {
      add(value, argument, -1);
    } else if constexpr (std::is_same_v<T, std::vector<TensorView>>) {
      for (const TensorView& view : value) add(view, argument, &view - value.data());
    }
  }
  std::span<Memory> all() {
    if constexpr (kHasLists) return memories_;
    return {memories_.data(), count_};
  }

 private:
  void add(const TensorView& view, const SchemaArgument& argument, int64_t index) {
    const auto memory = memory_of(view, argument.name, argument.is_written, index);
    if (!memory) return;
    if constexpr (kHasLists) {
      memories_.push_back(*memory);
    } else {
      memories_[count_++] = *memory;
    }
  }

  std::conditional_t<kHasLists, std::vector<Memory>, std::array<Memory, kCount>> memories_;
  size_t count_ = 0;
};

struct Boxed {
  StableIValue value;
  SchemaArgument argument;
};

// Slot<T> owns what torch put on the stack for one argument and makes the T that the op's function takes.
template <class T>
struct Slot {  // double, int64_t, bool, and std::optional of them
  static constexpr bool takes(std::string_view type) {
    if constexpr (std::is_same_v<T, double>) return type == "float";
    if constexpr (std::is_same_v<T, int64_t>) return type == "int" || type == "SymInt";
    if constexpr (std::is_same_v<T, bool>) return type == "bool";
    if constexpr (std::is_same_v<T, std::optional<double>>) return type == "float?";
    if constexpr (std::is_same_v<T, std::optional<int64_t>>) return type == "int?" || type == "SymInt?";
    return false;
  }
  explicit Slot(const Boxed& boxed) : value(torch::stable::detail::to<T>(boxed.value)) {}
  const T& get(Call&, const SchemaArgument&, const ArgumentName&) { return value; }
  T value;
};

struct TensorSlot {
  static constexpr bool takes(std::string_view type) {
    return type.starts_with("Tensor") && type.find('[') == std::string_view::npos;
  }
  explicit TensorSlot(const Boxed& boxed)
      : tensor(boxed.argument.is_optional ? Tensor(torch::stable::detail::to<OptionalHandle>(boxed.value))
                                          : Tensor(torch::stable::detail::to<Handle>(boxed.value))) {}
  Tensor tensor;
};

template <>
struct Slot<TensorView> : TensorSlot {
  using TensorSlot::TensorSlot;
  TensorView get(Call& call, const SchemaArgument& argument, const ArgumentName& name) {
    const TensorView view = view_of(tensor, name, argument.is_written);
    call.found(view, name);
    return view;
  }
};

template <>
struct Slot<ParameterView> : TensorSlot {
  static constexpr bool takes(std::string_view type) { return type == "Tensor" || type == "Tensor?"; }
  using TensorSlot::TensorSlot;
  ParameterView get(Call& call, const SchemaArgument&, const ArgumentName& name) {
    const ParameterView view{parameter_view_of(tensor, name)};
    call.found(view, name);
    return view;
  }
};

template <>
struct Slot<DenseView> : Slot<ParameterView> {
  using Slot<ParameterView>::Slot;
  DenseView get(Call& call, const SchemaArgument&, const ArgumentName& name) {
    const DenseView view{dense_view_of(tensor, name)};
    call.found(view, name);
    return view;
  }
};

template <>
struct Slot<MatrixView> : Slot<ParameterView> {
  using Slot<ParameterView>::Slot;
  MatrixView get(Call& call, const SchemaArgument&, const ArgumentName& name) {
    const MatrixView view{matrix_view_of(tensor, name), view_of(tensor, name)};
    call.found(view, name);
    return view;
  }
};

template <>
struct Slot<MergedRowsView> : Slot<ParameterView> {
  using Slot<ParameterView>::Slot;
  MergedRowsView get(Call& call, const SchemaArgument&, const ArgumentName& name) {
    const MergedRowsView view{rows_view_of(tensor, name), view_of(tensor, name)};
    call.found(view, name);
    return view;
  }
};

template <>
struct Slot<std::optional<DType>> {
  static constexpr bool takes(std::string_view type) { return type == "ScalarType?"; }
  explicit Slot(const Boxed& boxed) : number(torch::stable::detail::to<std::optional<int32_t>>(boxed.value)) {}
  std::optional<DType> get(Call&, const SchemaArgument&, const ArgumentName& name) {
    return number ? std::optional(dtype_of(*number, name)) : std::nullopt;
  }
  std::optional<int32_t> number;
};

template <>
struct Slot<std::vector<TensorView>> {
  static constexpr bool takes(std::string_view type) { return type.starts_with("Tensor") && type.ends_with("[]"); }
  explicit Slot(const Boxed& boxed);
  std::vector<TensorView> get(Call& call, const SchemaArgument& argument, const ArgumentName& name);
  std::vector<Tensor> tensors;
};

// Takes the text off the stack; torch's own conversion to std::string (2.13) leaks a copy.
std::string text_of(StableIValue value);

template <>
struct Slot<std::string> {
  static constexpr bool takes(std::string_view type) { return type == "str"; }
  explicit Slot(const Boxed& boxed) : value(text_of(boxed.value)) {}
  const std::string& get(Call&, const SchemaArgument&, const ArgumentName&) { return value; }
  std::string value;
};

template <Schema kSchema, auto kFunction>
struct Op;

template <Schema kSchema, class... Arguments, void (*kFunction)(Call&, Arguments...)>
struct Op<kSchema, kFunction> {
  static constexpr std::string_view kText = kSchema.view();
  static constexpr std::string_view kName = name_of(kText);
  static_assert(argument_count(kText) == sizeof...(Arguments), "the schema and the function differ in their arguments");

  static void define(torch::stable::detail::StableLibrary& library) { library.def(kSchema.text); }
  static void implement(torch::stable::detail::StableLibrary& library) {
    library.impl(std::string(kName).c_str(), [](StableIValue* stack, uint64_t, uint64_t output_count) {
      run(stack, output_count, std::index_sequence_for<Arguments...>());
    });
  }

 private:
  template <size_t... kIndex>
  static void run(StableIValue* stack, uint64_t output_count, std::index_sequence<kIndex...>) {
    static_assert((Slot<std::remove_cvref_t<Arguments>>::takes(argument_of(kText, kIndex).type) && ...),
                  "the schema and the function differ in the type of an argument");
    static constexpr std::array<SchemaArgument, sizeof...(Arguments)> kArguments{argument_of(kText, kIndex)...};
    // Braces: from left to right.
    std::tuple<Slot<std::remove_cvref_t<Arguments>>...> slots{Boxed{stack[kIndex], kArguments[kIndex]}...};
    Call call;
    at_border([&] {
      std::tuple<std::remove_cvref_t<Arguments>...> values{
          std::get<kIndex>(slots).get(call, kArguments[kIndex], {kName, kArguments[kIndex].name})...};
      if constexpr ((argument_of(kText, kIndex).is_written || ...)) {
        constexpr bool kHasLists = (std::is_same_v<std::remove_cvref_t<Arguments>, std::vector<TensorView>> || ...);
        Memories<sizeof...(Arguments), kHasLists> memories;
        (memories.add(std::get<kIndex>(values), kArguments[kIndex]), ...);
        check_written_memory(kName, memories.all());
      }
      kFunction(call, std::get<kIndex>(values)...);
      call.return_outputs(stack, output_count);
    });
  }
};

// A file's ops, to be named three times: STABLE_TORCH_LIBRARY_FRAGMENT defines them, CPU and CUDA implement them.
template <class... Ops>
struct OpList {
  static void define(torch::stable::detail::StableLibrary& library) { (Ops::define(library), ...); }
  static void implement(torch::stable::detail::StableLibrary& library) { (Ops::implement(library), ...); }
};

}  // namespace kernel_pytorch::torch_ops
