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

// Any dimensions in front are one number, bucketed; after an op's check they are merged where strides allow.
void describe_sizes(const Fields& fields, const Field& field, const TensorView& view, const void* problem,
                    tuning::KeyBuilder& key) {
  const Shape* shape = picked_shape(fields, field, problem);
  if (shape == nullptr) return key.field("dtype", view.dtype);
  const int any_count = view.rank - shape->named();
  for (int i = 0; i < shape->rank; ++i) {
    if (i == shape->any_at) {
      int64_t rows = 1;
      for (int j = 0; j < any_count; ++j) rows *= view.sizes[static_cast<size_t>(i + j)];
      key.field("rows", tuning::bucket(rows));
      continue;
    }
    const int16_t dimension = shape->dimensions[static_cast<size_t>(i)];
    if (dimension < 0) continue;
    const Dimension& named = fields.dimensions[static_cast<size_t>(dimension)];
    const bool is_behind = shape->any_at >= 0 && i > shape->any_at;
    key.field({named.name, named.name_hash}, view.size(is_behind ? i - shape->rank : i));
  }
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

std::vector<std::string> known_names(const Fields& fields) {
  std::vector<std::string> known;
  for (const Field& field : fields.all) {
    if (field.role == FieldRole::kUnused) continue;
    if (field.role == FieldRole::kOption || field.is_optional() ||
        (field.role == FieldRole::kSaved && !field.rules.trial.empty())) {
      known.emplace_back(trial_name(field));
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
      describe_sizes(fields, field, field.tensor(problem), problem, key);
    } else if (field.is_tensor()) {
      key.field(key_name(field), field.tensor(problem));
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

void make_fields(const Fields& fields, const ProblemRequest& request, void* problem) {
  const std::vector<std::string> names = known_names(fields);
  check_options(request, std::vector<std::string_view>(names.begin(), names.end()));
  const Field& leading = leading_input(fields);
  TensorView main = rows_view(request);
  leading.tensor(problem) = main;
  make_options(fields, request, problem);
  DimensionSizes sizes(fields);
  sizes.bind_options(problem);
  sizes.bind(leading, main, problem);
  for (const Field& field : fields.all) {
    if (!field.is_input() || !field.is_tensor() || &field == &leading) continue;
    const bool is_given = !field.is_optional() || flag_option(request, trial_name(field), field.rules.usual);
    if (!is_given) continue;
    const auto shape = sizes.shape_of(field, problem);
    KP_INTERNAL_CHECK(shape.has_value(), field.name, ": a request does not give its sizes");
    TensorView view = *shape;
    view.dtype = declared_type(fields, field, problem).value_or(request.dtype);
    view.dtype = dtype_option(request, trial_type_name(field), view.dtype);
    view.device = request.device;
    field.tensor(problem) = view;
  }
  for (const Field& field : fields.all) {
    if (!field.is_output()) continue;
    const bool is_made = field.when < 0 || fields.all[static_cast<size_t>(field.when)].tensor(problem).is_present();
    const bool is_kept =
        field.role != FieldRole::kSaved || field.rules.trial.empty() || flag_option(request, field.rules.trial, true);
    const auto type = declared_type(fields, field, problem);
    const auto shape = sizes.shape_of(field, problem);
    if (!is_made || !is_kept || !type.has_value() || !shape.has_value()) continue;
    TensorView view = *shape;
    view.dtype = field.rules.dtype_option.empty() ? *type : dtype_option(request, field.rules.dtype_option, *type);
    view.device = request.device;
    field.tensor(problem) = view;
  }
}

void move_fields(const Fields& fields, void* problem, Device device) {
  visit_fields(
      fields, problem,
      [](void* target, std::string_view, Role, TensorView& view) { view.device = *static_cast<Device*>(target); },
      &device);
}

int64_t bytes_of_fields(const Fields& fields, const void* problem) {
  int64_t bytes = 0;
  visit_fields(fields, const_cast<void*>(problem), add_tensor_bytes, &bytes);
  return bytes;
}

void shrink_fields(const Fields& fields, void* problem, int64_t elements) {
  const TensorView& main = leading_input(fields).tensor(problem);
  if (main.rank != 2) return;  // the leading dimensions did not merge: small enough, since requests make them merge
  const int64_t rows =
      std::clamp<int64_t>(elements / std::max<int64_t>(columns_of(main), 1), 1, std::max<int64_t>(rows_of(main), 1));
  for (const Field& field : fields.all) {
    if (!field.is_tensor() || field.role == FieldRole::kUnused || !field.has_leading_dimensions()) continue;
    TensorView& view = field.tensor(problem);
    if (view.is_present()) view.sizes[0] = std::min(view.sizes[0], rows);
  }
}

}  // namespace kernel_pytorch::registry
