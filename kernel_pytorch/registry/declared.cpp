#include "kernel_pytorch/registry/declared.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/registry/declaration.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::registry {
namespace {

Role role_of(const Field& field) {
  if (field.is_updated()) return Role::kUpdated;
  return field.is_output() ? Role::kOutput : Role::kInput;
}

bool has_tensors(const Field& field) {
  return field.role != FieldRole::kUnused && (field.is_tensor() || field.kind == FieldKind::kTensorList);
}

tuning::FieldName key_name(const Field& field) {
  return {field.name, field.name_hash};
}

bool has_dimension(const Shape& shape, int16_t dimension) {
  const auto end = shape.dimensions.begin() + shape.rank;
  return std::find(shape.dimensions.begin(), end, dimension) != end;
}

// Any dimensions in front are one number, bucketed; after an op's check they are merged where strides allow. `known`
// are described already, those of the leading tensor.
void describe_sizes(const Fields& fields, const Field& field, const TensorView& view, const Shape& shape,
                    const Shape* known, tuning::KeyBuilder& key) {
  const int any_count = view.rank - shape.named();
  for (int i = 0; i < shape.rank; ++i) {
    const int16_t dimension = shape.dimensions[static_cast<size_t>(i)];
    if (known != nullptr && has_dimension(*known, dimension)) continue;
    if (i == shape.any_at) {
      int64_t rows = 1;
      for (int j = 0; j < any_count; ++j) rows *= view.sizes[static_cast<size_t>(i + j)];
      key.field("rows", tuning::bucket(rows));
      continue;
    }
    if (dimension < 0) continue;
    const Dimension& named = fields.dimensions[static_cast<size_t>(dimension)];
    const bool is_behind = shape.any_at >= 0 && i > shape.any_at;
    const int64_t size = view.size(is_behind ? i - shape.rank : i);
    key.field({named.name, named.name_hash}, has_word(field.rules.bucketed, named.name) ? tuning::bucket(size) : size);
  }
}

void describe_leading(const Fields& fields, const Field& field, const void* problem, tuning::KeyBuilder& key) {
  const TensorView& view = field.tensor(problem);
  const Shape* shape = picked_shape(fields, field, problem);
  if (shape == nullptr) return key.field("dtype", view.dtype);
  describe_sizes(fields, field, view, *shape, nullptr, key);
  key.field("dtype", view.dtype);
  key.field("dense", view.rank == shape->rank && view.rank > 0 && view.stride(-1) == 1);
}

void describe_option(const Field& field, const void* problem, tuning::KeyBuilder& key) {
  const bool presence = field.rules.key == KeyPart::kPresence;
  switch (field.kind) {
    case FieldKind::kInteger: {
      const int64_t value = field.value<int64_t>(problem);
      return key.field(key_name(field), presence ? value != 0 : value);
    }
    case FieldKind::kFlag:
      return key.field(key_name(field), field.value<bool>(problem));
    case FieldKind::kChoice:
      return key.field(key_name(field), field.value<uint8_t>(problem));
    case FieldKind::kText: {
      const std::string& text = field.value<std::string>(problem);
      return key.field(key_name(field),
                       presence || text.empty() ? !text.empty() : static_cast<int64_t>(hash_text(text)));
    }
    case FieldKind::kNumber:
      KP_INTERNAL_CHECK(presence, field.name, ": a kernel may depend on whether a number is 0, not on its value");
      return key.field(key_name(field), field.value<double>(problem) != 0);
    default:
      KP_INTERNAL_CHECK(false, field.name, ": no rule says how it is part of the key");
  }
}

// The text of a request's option for this field, and for its type.
std::string_view trial_name(const Field& field) {
  return field.rules.trial.empty() ? field.name : field.rules.trial;
}
std::string trial_type_name(const Field& field) {
  if (!field.rules.trial_dtype.empty()) return std::string(field.rules.trial_dtype);
  return field.rules.dtype_option.empty() ? concat(field.name, "_dtype") : std::string(field.rules.dtype_option);
}

void make_option(const Field& field, const ProblemRequest& request, void* problem) {
  const std::string_view name = trial_name(field);
  switch (field.kind) {
    case FieldKind::kNumber:
      field.value<double>(problem) = number_option(request, name, field.value<double>(problem));
      break;
    case FieldKind::kOptionalNumber:
      if (has_option(request, name)) field.value<std::optional<double>>(problem) = number_option(request, name, 0);
      break;
    case FieldKind::kInteger:
      field.value<int64_t>(problem) = integer_option(request, name, field.value<int64_t>(problem));
      break;
    case FieldKind::kOptionalInteger:
      if (has_option(request, name)) field.value<std::optional<int64_t>>(problem) = integer_option(request, name, 0);
      break;
    case FieldKind::kFlag:
      field.value<bool>(problem) = flag_option(request, name, field.value<bool>(problem));
      break;
    case FieldKind::kText:
      field.value<std::string>(problem) = text_option(request, name);
      break;
    case FieldKind::kChoice: {
      const auto words = words_of(field.rules.choices);
      field.value<uint8_t>(problem) =
          static_cast<uint8_t>(choice_option(request, name, words, words[field.value<uint8_t>(problem)]));
      break;
    }
    case FieldKind::kTensor:
    case FieldKind::kTensorList:
      break;
  }
}

// What a request says of a tensor that may be absent: NAME=0|1, or its type, which means that it is there.
struct Presence {
  bool is_given;
  std::optional<DType> dtype{};
};
Presence presence_option(const ProblemRequest& request, std::string_view name, bool usual) {
  const std::string text = text_option(request, name);
  if (const auto dtype = text.empty() ? std::nullopt : parse_dtype(text)) return {true, dtype};
  return {flag_option(request, name, usual)};
}

std::vector<std::string> known_names(const Fields& fields, const RequestForm& form) {
  std::vector<std::string> known;
  std::string_view arranged = form.options;
  for (auto word = take_token(arranged); !word.empty(); word = take_token(arranged)) known.emplace_back(word);
  for (const Field& field : fields.all) {
    if (field.role == FieldRole::kUnused) continue;
    if (field.role == FieldRole::kOption || field.is_optional() || (field.is_output() && !field.rules.trial.empty())) {
      known.emplace_back(trial_name(field));
    }
    if (field.is_output() && !field.rules.wanted.empty() && fields.find(field.rules.wanted) == nullptr) {
      known.emplace_back(field.rules.wanted);
    }
    const bool is_leading = &field == &leading_input(fields);
    const bool has_free_type = field.is_input() && field.rules.dtype.empty() && !is_leading;
    if (field.is_tensor() && (has_free_type || !field.rules.dtype_option.empty() || !field.rules.trial_dtype.empty())) {
      known.push_back(trial_type_name(field));
    }
  }
  return known;
}

}  // namespace

void visit_fields(const Fields& fields, void* problem, TensorVisitor visit, void* state) {
  const PresentTensors call{visit, state};
  for (const Field& field : fields.all) {
    if (!has_tensors(field)) continue;
    if (field.is_tensor()) {
      call(field.name, role_of(field), field.tensor(problem));
      continue;
    }
    for (TensorView& view : field.value<std::vector<TensorView>>(problem)) call(field.name, role_of(field), view);
  }
}

void describe_fields(const Fields& fields, const void* problem, tuning::KeyBuilder& key) {
  for (const Field& field : fields.all) {
    // Whether a backward will follow decides about no kernel: what is measured in training serves inference.
    if (field.role == FieldRole::kUnused || field.role == FieldRole::kSaved) continue;
    if (field.rules.leads) {
      describe_leading(fields, field, problem, key);
    } else if (field.is_tensor()) {
      const TensorView& view = field.tensor(problem);
      key.field(key_name(field), view);
      if (field.rules.key != KeyPart::kSizes) continue;
      describe_sizes(fields, field, view, *picked_shape(fields, field, problem),
                     picked_shape(fields, leading_input(fields), problem), key);
    } else if (field.rules.key != KeyPart::kNone) {
      describe_option(field, problem, key);
    }
  }
}

void make_options(const Fields& fields, const ProblemRequest& request, void* problem) {
  for (const Field& field : fields.all) {
    if (field.role == FieldRole::kOption) make_option(field, request, problem);
  }
}

std::vector<std::string_view> option_names(const Fields& fields) {
  std::vector<std::string_view> names;
  for (const Field& field : fields.all) {
    if (field.role == FieldRole::kOption) names.push_back(trial_name(field));
  }
  return names;
}

namespace {

// Makes the tensors of one problem, in the order in which their sizes and types become known.
struct TensorMaker {
  const Fields& fields;
  const RequestForm& form;
  const ProblemRequest& request;
  void* problem;
  DimensionSizes sizes{fields};

  // The sizes that the request gives, as `form` or the leading input names them.
  void bind_request(std::string_view op) {
    sizes.bind_options(problem);
    const Field& leading = leading_input(fields);
    if (form.shape.empty()) {
      leading.tensor(problem) = rows_view(request);
      sizes.bind(leading, leading.tensor(problem), problem);
      return;
    }
    const Shape shape = shape_named();
    const auto rank = static_cast<int>(request.shape.size());
    KP_CHECK(rank >= shape.named() && (shape.any_at >= 0 || rank == shape.named()), op, ": the shape is ",
             shape_text(request.shape), "; it gives the sizes \"", form.shape, "\"");
    sizes.bind(shape, contiguous_view(nullptr, request.dtype, request.shape));
  }

  Shape shape_named() const {
    Shape shape;
    std::string_view text = form.shape;
    for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
      const auto found = std::ranges::find(fields.dimensions, word, &Dimension::name);
      const bool is_any = word == "...";
      KP_INTERNAL_CHECK(is_any || found != fields.dimensions.end(), word, " is no dimension of the list");
      if (is_any) shape.any_at = shape.rank;
      shape.dimensions[static_cast<size_t>(shape.rank++)] =
          is_any ? kAnyDimensions : static_cast<int16_t>(found - fields.dimensions.begin());
    }
    return shape;
  }

  // The request's own type where the field leads, else what the request, the list or the leading tensor says.
  DType type_of(const Field& field, const Presence& presence) const {
    const std::string_view leads = form.type_of.empty() ? leading_input(fields).name : form.type_of;
    if (field.name == leads) return request.dtype;
    const DType declared = declared_type(fields, field, problem).value_or(request.dtype);
    const bool may_be_told = field.is_input() || !field.rules.dtype_option.empty() || !field.rules.trial_dtype.empty();
    return presence.dtype.value_or(may_be_told ? dtype_option(request, trial_type_name(field), declared) : declared);
  }

  void put(const Field& field, TensorView view, const Presence& presence) {
    view.dtype = type_of(field, presence);
    view.device = request.device;
    field.tensor(problem) = view;
  }

  void make_input(const Field& field) {
    const Presence presence =
        field.is_optional() ? presence_option(request, trial_name(field), field.rules.usual) : Presence{true};
    // A tensor without a declared shape is Operation::arrange's to make.
    if (!presence.is_given || field.tensor(problem).is_present() || (field.shape_count == 0 && field.like < 0)) return;
    const auto shape = sizes.shape_of(field, problem);
    KP_INTERNAL_CHECK(shape.has_value(), field.name, ": a request does not give its sizes");
    put(field, *shape, presence);
  }

  Presence presence_of_output(const Field& field) const {
    const Rules& rules = field.rules;
    if (!rules.trial.empty()) return presence_option(request, rules.trial, field.role == FieldRole::kSaved);
    return {rules.wanted.empty() || fields.find(rules.wanted) != nullptr || flag_option(request, rules.wanted, true)};
  }

  void make_output(const Field& field) {
    const bool has_cause = field.when < 0 || fields[field.when].tensor(problem).is_present();
    const Presence presence = presence_of_output(field);
    const bool has_type = declared_type(fields, field, problem).has_value();
    const auto shape = sizes.shape_of(field, problem);
    if (has_cause && presence.is_given && has_type && shape.has_value()) put(field, *shape, presence);
  }
};

}  // namespace

void make_fields(std::string_view op, const Fields& fields, const RequestForm& form, const ProblemRequest& request,
                 void* problem) {
  const std::vector<std::string> names = known_names(fields, form);
  check_options(request, std::vector<std::string_view>(names.begin(), names.end()));
  make_options(fields, request, problem);
  TensorMaker maker{fields, form, request, problem};
  maker.bind_request(op);
  const auto make_inputs = [&](bool of_outputs) {  // whose types are those of outputs
    for (const Field& field : fields.all) {
      const bool follows_output = field.type_of >= 0 && fields[field.type_of].is_output();
      if (field.is_input() && field.is_tensor() && follows_output == of_outputs) maker.make_input(field);
    }
  };
  make_inputs(false);
  for (const Field& field : fields.all) {
    if (field.is_output() && field.is_tensor()) maker.make_output(field);
  }
  make_inputs(true);
}

void set_device(void* device, std::string_view, Role, TensorView& view) {
  view.device = *static_cast<const Device*>(device);
}

int64_t bytes_of_fields(const Fields& fields, const void* problem) {
  int64_t bytes = 0;
  visit_fields(fields, const_cast<void*>(problem), add_tensor_bytes, &bytes);
  return bytes;
}

int64_t batches_within(const TensorView& view, int64_t elements) {
  const int64_t batch = std::max<int64_t>(view.sizes[0], 1);
  return std::clamp<int64_t>(elements / std::max<int64_t>(view.element_count() / batch, 1), 1, batch);
}

void shrink_fields(const Fields& fields, void* problem, int64_t elements) {
  const TensorView& main = leading_input(fields).tensor(problem);
  if (main.rank != 2) return;  // the leading dimensions did not merge: small enough, since requests make them merge
  std::vector<TensorView*> views;
  int64_t widest = 1;
  for (const Field& field : fields.all) {
    if (!field.is_tensor() || field.role == FieldRole::kUnused || !field.tensor(problem).is_present()) continue;
    const Shape* shape = picked_shape(fields, field, problem);
    if (shape == nullptr || shape->any_at != 0) continue;
    views.push_back(&field.tensor(problem));
    if (views.back()->rank == 2) widest = std::max(widest, columns_of(*views.back()));
  }
  const int64_t rows = std::clamp<int64_t>(elements / widest, 1, std::max<int64_t>(rows_of(main), 1));
  for (TensorView* view : views) view->sizes[0] = std::min(view->sizes[0], rows);
}

}  // namespace kernel_pytorch::registry
