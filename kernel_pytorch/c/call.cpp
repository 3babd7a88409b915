#include "kernel_pytorch/c/call.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/overlap.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/host_call.h"

namespace kernel_pytorch::c_interface {
namespace {

using registry::ArgumentKind;
using registry::Declaration;
using registry::Signature;

static_assert(static_cast<int>(DType::kBool) == KP_BOOL && kDTypeCount == KP_BOOL + 1);
static_assert(static_cast<int>(DType::kFloat64) == KP_FLOAT64 && static_cast<int>(DType::kBFloat16) == KP_BFLOAT16 &&
              static_cast<int>(DType::kFloat8E5M2) == KP_FLOAT8_E5M2 && static_cast<int>(DType::kInt32) == KP_INT32);

constexpr const char* kKindNames[] = {"a tensor", "a list of tensors", "a number", "an integer", "a flag", "a text"};

// "rms_norm: weight"
struct Name {
  std::string_view op, argument;
  friend std::ostream& operator<<(std::ostream& out, const Name& name) {
    return out << name.op << ": " << name.argument;
  }
};

struct Op {
  const Declaration* declaration;
  Signature signature;
};

const Op& op_named(std::string_view name) {
  static const auto* all = [] {
    auto* ops = new std::unordered_map<std::string_view, Op>;
    for (const Declaration& one : declarations()) ops->emplace(one.name, Op{&one, registry::signature_of(one)});
    return ops;
  }();
  if (const auto found = all->find(name); found != all->end()) return found->second;
  std::vector<std::string> known;
  for (const Declaration& one : declarations()) known.emplace_back(one.name);
  const std::string meant = nearest_name(name, known);
  fail(ErrorCode::kInvalidArgument, "kp_call: unknown op \"", name.substr(0, 100), "\"",
       meant.empty() ? "" : "; did you mean " + meant + "?", " (ops: ", joined(known, ", "), ")");
}

TensorView view_of(const kp_tensor& tensor, const Name& name, Device device) {
  KP_CHECK(tensor.rank >= 0 && tensor.rank <= kMaxRank, name, " has rank ", tensor.rank, "; it must be from 0 to ",
           kMaxRank);
  KP_CHECK(tensor.rank == 0 || tensor.sizes != nullptr, name, " has rank ", tensor.rank, " and no sizes");
  KP_CHECK(tensor.dtype >= 0 && tensor.dtype < kDTypeCount, name, " has the dtype ", tensor.dtype,
           "; those of kp_dtype are known");
  TensorView view =
      contiguous_view(tensor.data, static_cast<DType>(tensor.dtype),
                      std::span(tensor.sizes, static_cast<size_t>(tensor.rank)), device_of(tensor.device));
  if (tensor.strides != nullptr) std::copy_n(tensor.strides, tensor.rank, view.strides.begin());
  for (int i = 0; i < view.rank; ++i) {
    KP_CHECK(view.strides[static_cast<size_t>(i)] >= 0, name, " has a stride of ", view.stride(i),
             "; strides are not negative");
  }
  KP_CHECK(view.device == device, name, " is on ", view.device, ", the context on ", device,
           "; make a context for the device of the tensors");
  KP_CHECK(tensor.data != nullptr || view.element_count() == 0, name, " has ", view.element_count(),
           " elements and its data is NULL");
  KP_CHECK(is_aligned(view, size_of(view.dtype)), name, " does not begin at a multiple of its elements' ",
           size_of(view.dtype), " bytes");
  return view;
}

bool has_merging_front(TensorView view, int kept) {
  return merge_front(view, kept);
}

// Front ends with an allocator copy what lies otherwise; a C caller is told.
bool lies_as(MemoryLayout memory, const TensorView& view) {
  const auto is_dense = [&](int dimension) { return view.size(dimension) <= 1 || view.stride(dimension) == 1; };
  switch (memory) {
    case MemoryLayout::kStrided:
      return true;
    case MemoryLayout::kDenseLast:
      return view.rank == 0 || is_dense(-1);
    case MemoryLayout::kContiguous:
    case MemoryLayout::kFlat:
      return is_contiguous(view);
    case MemoryLayout::kMatrix:
      return view.rank < 2 || ((is_dense(-1) || is_dense(-2)) && has_merging_front(view, 2));
    case MemoryLayout::kRows:
      return view.rank < 1 || (is_dense(-1) && has_merging_front(view, 1));
  }
  return false;
}

class CCall final : public registry::ArgumentSource {
 public:
  CCall(const Op& op, std::span<const kp_argument> given, Context& context)
      : op_(op), given_(given), context_(context), sizes_(fields()) {
    seen_.reserve(given.size());
    check_names();
  }

  void fill(void* arguments) override {
    for (const registry::Argument& argument : op_.signature.arguments) {
      if (argument.kind == ArgumentKind::kField) fill_argument(argument, arguments);
    }
    ask_for_outputs(arguments);
    bind_sizes(arguments);
    for (const registry::Output& output : op_.signature.outputs) fill_output(output, arguments);
    for (const int8_t output : op_.signature.in_place) {
      fields()[output].tensor(arguments) = fields()[fields()[output].in_place].tensor(arguments);
    }
    check_memory();
  }
  Context& context() override { return context_; }
  // The kernel that this call has to use; empty: any.
  std::string_view kernel() const {
    const kp_argument* given = find(kKernel);
    return given == nullptr ? std::string_view() : text_of(*given);
  }

 private:
  static constexpr std::string_view kKernel = "kernel";  // no op has an argument of this name, a test says

  struct Seen {
    std::string_view name;
    TensorView view;
    bool is_written;
  };

  const Fields& fields() const { return op_.declaration->fields; }
  Name named(std::string_view argument) const { return {op_.declaration->name, argument}; }
  const kp_argument* find(std::string_view name) const {
    const auto found = std::ranges::find(names_, name);
    return found == names_.end() ? nullptr : &given_[static_cast<size_t>(found - names_.begin())];
  }

  bool is_known(std::string_view name) const {
    const auto is_argument = [&](const registry::Argument& one) {
      return one.kind == ArgumentKind::kField && one.name == name;
    };
    const auto is_output = [&](const registry::Output& one) { return one.name == name; };
    return std::ranges::any_of(op_.signature.arguments, is_argument) ||
           std::ranges::any_of(op_.signature.outputs, is_output) || name == kKernel;
  }
  std::string known_names() const {
    std::vector<std::string> known;
    for (const registry::Argument& one : op_.signature.arguments) {
      if (one.kind == ArgumentKind::kField) known.emplace_back(one.name);
    }
    for (const registry::Output& one : op_.signature.outputs) known.emplace_back(one.name);
    return joined(known, ", ");
  }

  void check_names() {
    names_.reserve(given_.size());
    for (const kp_argument& one : given_) {
      KP_CHECK(one.name != nullptr, op_.declaration->name, ": an argument has no name");
      const std::string_view name = one.name;
      KP_CHECK(is_known(name), op_.declaration->name, " has no argument \"", name.substr(0, 100),
               "\"; it has: ", known_names());
      KP_CHECK(find(name) == nullptr, named(name), " is given twice");
      names_.push_back(name);
      KP_CHECK(one.kind >= KP_TENSOR && one.kind <= KP_TEXT, named(name), " has the kind ", one.kind,
               "; those of kp_kind are known");
    }
  }

  [[noreturn]] void refuse_kind(const kp_argument& given, std::string_view wanted) const {
    fail(ErrorCode::kInvalidArgument, named(given.name), " is given as ", kKindNames[given.kind], "; it is ", wanted);
  }

  TensorView tensor_of(const kp_argument& given, bool is_written) {
    if (given.kind != KP_TENSOR) refuse_kind(given, kKindNames[KP_TENSOR]);
    KP_CHECK(given.value.tensors != nullptr, named(given.name), " is NULL; leave an absent tensor out");
    return seen(given, *given.value.tensors, is_written);
  }
  TensorView seen(const kp_argument& given, const kp_tensor& tensor, bool is_written) {
    const TensorView view = view_of(tensor, named(given.name), context_.device());
    seen_.push_back({given.name, view, is_written});
    return view;
  }

  void fill_argument(const registry::Argument& argument, void* arguments) {
    const Field& field = fields()[argument.field];
    const kp_argument* given = find(argument.name);
    if (given == nullptr) {
      const bool is_optional = field.role == FieldRole::kOption || argument.is_optional;
      const bool is_empty_list = field.kind == FieldKind::kTensorList && has_list();  // next to others that are given
      const bool may_be_absent = is_optional || is_empty_list;
      KP_CHECK(may_be_absent, named(argument.name), " is missing; give it as ",
               kKindNames[field.is_tensor() ? KP_TENSOR : KP_TENSORS]);
      return;
    }
    if (field.is_tensor()) {
      TensorView& view = field.tensor(arguments);
      view = tensor_of(*given, argument.is_updated);
      KP_CHECK(lies_as(field.rules.memory, view), named(argument.name), " is ", view,
               "; this op takes it without such strides, make a row-major copy");
    } else if (field.kind == FieldKind::kTensorList) {
      fill_list(*given, argument.is_updated, field.tensors(arguments));
    } else {
      fill_option(*given, field, arguments);
    }
  }

  bool has_list() const {
    return std::ranges::any_of(op_.signature.arguments, [&](const registry::Argument& one) {
      return one.kind == ArgumentKind::kField && fields()[one.field].kind == FieldKind::kTensorList &&
             find(one.name) != nullptr;
    });
  }

  void fill_list(const kp_argument& given, bool is_written, std::vector<TensorView>& views) {
    if (given.kind != KP_TENSORS && given.kind != KP_TENSOR) refuse_kind(given, kKindNames[KP_TENSORS]);
    KP_CHECK(given.count == 0 || given.value.tensors != nullptr, named(given.name), " has ", given.count,
             " tensors and is NULL");
    for (const kp_tensor& tensor : std::span(given.value.tensors, given.count)) {
      views.push_back(seen(given, tensor, is_written));
    }
  }

  double number_of(const kp_argument& given) const {
    if (given.kind == KP_INTEGER) return static_cast<double>(given.value.integer);
    if (given.kind != KP_NUMBER) refuse_kind(given, kKindNames[KP_NUMBER]);
    return given.value.number;
  }
  int64_t integer_of(const kp_argument& given) const {
    if (given.kind != KP_INTEGER) refuse_kind(given, kKindNames[KP_INTEGER]);
    return given.value.integer;
  }
  std::string_view text_of(const kp_argument& given) const {
    if (given.kind != KP_TEXT) refuse_kind(given, kKindNames[KP_TEXT]);
    KP_CHECK(given.value.text != nullptr, named(given.name), " is NULL");
    return given.value.text;
  }

  void fill_option(const kp_argument& given, const Field& field, void* arguments) const {
    switch (field.kind) {
      case FieldKind::kNumber:
        field.value<double>(arguments) = number_of(given);
        return;
      case FieldKind::kOptionalNumber:
        field.value<std::optional<double>>(arguments) = number_of(given);
        return;
      case FieldKind::kInteger:
        field.value<int64_t>(arguments) = integer_of(given);
        return;
      case FieldKind::kOptionalInteger:
        field.value<std::optional<int64_t>>(arguments) = integer_of(given);
        return;
      case FieldKind::kFlag:
        if (given.kind != KP_FLAG && given.kind != KP_INTEGER) refuse_kind(given, kKindNames[KP_FLAG]);
        KP_CHECK(given.value.integer == 0 || given.value.integer == 1, named(given.name), " is ", given.value.integer,
                 "; a flag is 0 or 1");
        field.value<bool>(arguments) = given.value.integer != 0;
        return;
      case FieldKind::kText:
        field.value<std::string>(arguments) = text_of(given);
        return;
      case FieldKind::kChoice:
        fill_choice(given, field, arguments);
        return;
      case FieldKind::kTensor:
      case FieldKind::kTensorList:
        KP_INTERNAL_CHECK(false, named(given.name), " is no option");
    }
  }

  void fill_choice(const kp_argument& given, const Field& field, void* arguments) const {
    const std::string_view text = text_of(given);
    std::vector<std::string> known;
    std::string_view choices = field.rules.choices;
    for (auto word = take_token(choices); !word.empty(); word = take_token(choices)) {
      if (word == text) {
        field.value<uint8_t>(arguments) = static_cast<uint8_t>(known.size());
        return;
      }
      known.emplace_back(word);
    }
    fail(ErrorCode::kInvalidArgument, named(given.name), " is \"", text.substr(0, 100), "\"; known are ",
         joined(known, ", "));
  }

  // An option that asks for an output is set where the output is given, unless the caller says otherwise.
  void ask_for_outputs(void* arguments) const {
    for (const registry::Output& output : op_.signature.outputs) {
      if (find(output.name) == nullptr) continue;
      std::string_view flags = fields()[output.field].rules.wanted;
      for (auto flag = take_token(flags); !flag.empty(); flag = take_token(flags)) {
        const Field* option = fields().find(flag);
        if (option != nullptr && find(flag) == nullptr) option->value<bool>(arguments) = true;
      }
    }
  }

  // As a front end that allocates the outputs does: sizes are known before tensors become flat.
  void bind_sizes(void* arguments) {
    sizes_.bind_options(arguments);
    for (const registry::Argument& argument : op_.signature.arguments) {
      const Field& field = fields()[argument.field];
      if (argument.kind != ArgumentKind::kField || !field.is_tensor()) continue;
      TensorView& view = field.tensor(arguments);
      sizes_.bind(field, view, arguments);
      if (field.rules.memory == MemoryLayout::kFlat && view.is_present()) view = flat(view);
    }
  }
  static TensorView flat(const TensorView& view) {
    return contiguous_view(view.data, view.dtype, {view.element_count()}, view.device);
  }

  void fill_output(const registry::Output& output, void* arguments) {
    const Field& field = fields()[output.field];
    const kp_argument* given = find(output.name);
    const bool has_cause = field.when < 0 || fields()[field.when].tensor(arguments).is_present();
    const bool is_like_absent = field.like >= 0 && !fields()[field.like].tensor(arguments).is_present();
    if (given == nullptr) {
      const bool is_optional = !field.rules.wanted.empty() || field.role == FieldRole::kSaved;
      const bool may_be_absent = !has_cause || is_optional || is_like_absent;
      KP_CHECK(may_be_absent, named(output.name), " is missing; give memory for this output");
      return;
    }
    KP_CHECK(has_cause, named(output.name), " is an output that comes with ", fields()[field.when].name,
             ", which is absent; leave it out");
    const TensorView view = tensor_of(*given, true);
    if (const auto shape = sizes_.shape_of(field, arguments)) {
      KP_CHECK(std::ranges::equal(shape->shape(), view.shape()), named(output.name), " has the sizes ",
               shape_text(view.shape()), "; those of this output are ", shape_text(shape->shape()));
    }
    if (const auto type = declared_type(fields(), field, arguments); type && field.rules.dtype_option.empty()) {
      KP_CHECK(view.dtype == *type, named(output.name), " is ", view.dtype, "; this output is ", *type);
    }
    KP_CHECK(field.rules.memory != MemoryLayout::kFlat || is_contiguous(view), named(output.name), " is ", view,
             "; this output is row-major");
    field.tensor(arguments) = field.rules.memory == MemoryLayout::kFlat ? flat(view) : view;
  }

  void check_memory() const {
    for (const Seen& written : seen_) {
      if (!written.is_written) continue;
      KP_CHECK(!overlaps_itself(written.view), named(written.name), " is ", written.view,
               ": several of its elements are one place in memory, and the op writes into it");
      for (const Seen& other : seen_) {
        KP_CHECK(&other == &written || !overlap(written.view, other.view), named(written.name), " shares memory with ",
                 other.name, "; the op writes into it, give it memory of its own");
      }
    }
  }

  const Op& op_;
  const std::span<const kp_argument> given_;
  std::vector<std::string_view> names_;  // of given_
  Context& context_;
  DimensionSizes sizes_;
  std::vector<Seen> seen_;
};

}  // namespace

Device device_of(const kp_device& device) {
  KP_CHECK(device.kind == KP_CPU || device.kind == KP_CUDA, "kp_device: the kind is ", device.kind,
           "; KP_CPU and KP_CUDA are known");
  KP_CHECK(device.index >= 0 && device.index < 1024 && (device.kind == KP_CUDA || device.index == 0),
           "kp_device: the index is ", device.index, "; it counts GPUs from 0, and is 0 for the CPU");
  return {static_cast<DeviceKind>(device.kind), static_cast<int16_t>(device.index)};
}

void call_op(Context& context, const char* op, std::span<const kp_argument> arguments) {
  KP_CHECK(op != nullptr, "kp_call: the op's name is NULL");
  const Op& found = op_named(op);
  const ScratchScope scope(context.scratch);
  Context own = context;
  CCall call(found, arguments, own);
  own.kernel_override = call.kernel();
  registry::call_declared(*found.declaration, call);
}

}  // namespace kernel_pytorch::c_interface
