// Problems made of requests: options and tensors by the list of fields.
#include <algorithm>
#include <charconv>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/declaration.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::registry {
namespace {

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
  if (text.empty()) return {usual};
  if (const auto dtype = parse_dtype(text)) return {true, dtype};
  KP_CHECK(text == "0" || text == "1", "option ", name, "=", text, ": unknown; give 0, 1 or a type such as fp32");
  return {text == "1"};
}

bool is_option(const Fields& fields, std::string_view name) {
  const Field* field = fields.find(name);
  return field != nullptr && field->role == FieldRole::kOption;
}

std::vector<std::string> known_names(const Fields& fields, const RequestForm& form) {
  std::vector<std::string> known;
  std::string_view arranged = form.options;
  for (auto word = take_token(arranged); !word.empty(); word = take_token(arranged)) known.emplace_back(word);
  std::string_view sizes = form.sizes;
  for (auto word = take_token(sizes); !word.empty(); word = take_token(sizes)) {
    known.emplace_back(word.substr(0, word.find('=')));
  }
  for (const Field& field : fields.all) {
    if (field.role == FieldRole::kUnused) continue;
    // A tensor without a declared shape is Operation::arrange's to make.
    const bool may_be_absent = (field.is_optional() && (field.shape_count > 0 || field.like >= 0)) ||
                               (field.is_output() && !field.rules.trial.empty());
    if (field.role == FieldRole::kOption || may_be_absent) known.emplace_back(trial_name(field));
    std::string_view flags = field.is_output() ? field.rules.wanted : "";
    for (auto flag = take_token(flags); !flag.empty(); flag = take_token(flags)) {
      if (!is_option(fields, flag)) known.emplace_back(flag);
    }
    const bool is_leading = &field == &leading_input(fields);
    const bool has_free_type = field.is_input() && field.rules.dtype.empty() && !is_leading;
    if (field.is_tensor() && (has_free_type || !field.rules.dtype_option.empty() || !field.rules.trial_dtype.empty())) {
      known.push_back(trial_type_name(field));
    }
  }
  return known;
}

int dimension_named(const Fields& fields, std::string_view name) {
  const auto found = std::ranges::find(fields.dimensions, name, &Dimension::name);
  KP_INTERNAL_CHECK(found != fields.dimensions.end(), name, " is no dimension of the list");
  return static_cast<int>(found - fields.dimensions.begin());
}

}  // namespace

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

  // The dimensions of `form.sizes`.
  void bind_sizes(std::string_view op) {
    std::string_view text = form.sizes;
    for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
      const std::string_view name = word.substr(0, word.find('='));
      const std::string_view usual = word.substr(std::min(name.size() + 1, word.size()));
      const int dimension = dimension_named(fields, name);
      int64_t size = -1;
      if (has_option(request, name)) {
        size = integer_option(request, name, 0);
        KP_CHECK(size >= 0, op, ": option ", name, "=", size, ": a size cannot be negative");
      } else if (!usual.empty() && std::from_chars(usual.data(), usual.data() + usual.size(), size).ec != std::errc()) {
        const std::string_view source = usual.substr(0, usual.find('?'));
        const Field* flag = source.size() < usual.size() ? fields.find(usual.substr(source.size() + 1)) : nullptr;
        size = sizes.size_of(dimension_named(fields, source)).value_or(-1);
        if (flag != nullptr && flag->value<bool>(problem)) size *= 2;
      }
      if (size < 0) continue;
      const int8_t option = fields.dimensions[static_cast<size_t>(dimension)].option;
      if (option >= 0) {
        fields[option].value<int64_t>(problem) = size;
        sizes.bind_options(problem);
      }
      sizes.set(dimension, size);
    }
  }

  // The sizes that the request gives, as `form` or the leading input names them.
  void bind_request(std::string_view op) {
    bind_shape(op);
    bind_sizes(op);
  }

  void bind_shape(std::string_view op) {
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
    for (int i = 0; i < shape.rank; ++i) {  // a size that is an option is that option's value
      const int16_t dimension = shape.dimensions[static_cast<size_t>(i)];
      const int8_t option = dimension < 0 ? int8_t{-1} : fields.dimensions[static_cast<size_t>(dimension)].option;
      const bool is_behind = shape.any_at >= 0 && i > shape.any_at;
      if (option >= 0)
        fields[option].value<int64_t>(problem) =
            request.shape[static_cast<size_t>(is_behind ? i - shape.rank + rank : i)];
    }
    sizes.bind_options(problem);
  }

  Shape shape_named() const {
    Shape shape;
    std::string_view text = form.shape;
    for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
      if (word == "...") shape.any_at = shape.rank;
      shape.dimensions[static_cast<size_t>(shape.rank++)] =
          word == "..." ? kAnyDimensions : static_cast<int16_t>(dimension_named(fields, word));
    }
    return shape;
  }

  // The request's own type where the field leads, else what the request, the list or the leading tensor says.
  DType type_of(const Field& field, const Presence& presence) const {
    const std::string_view leads = form.type_of.empty() ? leading_input(fields).name : form.type_of;
    if (field.name == leads) return request.dtype;
    const bool is_whole = field.rules.content.starts_with("indices") || field.rules.content == "seeds";
    const DType usual = is_whole                                     ? DType::kInt64
                        : field.rules.content.starts_with("offsets") ? DType::kInt32
                                                                     : request.dtype;
    const DType declared = declared_type(fields, field, problem).value_or(usual);
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
    if (!presence.is_given || field.tensor(problem).is_present() || (field.shape_count == 0 && field.like < 0)) return;
    const auto shape = sizes.shape_of(field, problem);
    KP_INTERNAL_CHECK(shape.has_value(), field.name, ": a request does not give its sizes");
    put(field, *shape, presence);
  }

  Presence presence_of_output(const Field& field) const {
    const Rules& rules = field.rules;
    if (!rules.trial.empty()) return presence_option(request, rules.trial, field.role == FieldRole::kSaved);
    std::string_view flags = rules.wanted;
    for (auto flag = take_token(flags); !flag.empty(); flag = take_token(flags)) {
      if (!is_option(fields, flag) && !flag_option(request, flag, true)) return {false};
    }
    return {true};
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

}  // namespace kernel_pytorch::registry
