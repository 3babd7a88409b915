#include "kernel_pytorch/registry/declared.h"

#include <algorithm>
#include <charconv>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/registry/declaration.h"

namespace kernel_pytorch::registry {
namespace {

// An input is written where the output that may take its memory is absent.
Role role_of(const Fields& fields, const Field& field, const void* problem) {
  if (field.is_updated()) return Role::kUpdated;
  if (field.is_output()) return Role::kOutput;
  for (const Field& output : fields.all) {
    const bool takes_memory = output.in_place >= 0 && &fields[output.in_place] == &field;
    if (takes_memory && !output.tensor(problem).is_present()) return Role::kUpdated;
  }
  return Role::kInput;
}

bool has_tensors(const Field& field) {
  return field.is_tensor() || field.kind == FieldKind::kTensorList;
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

}  // namespace

void visit_fields(const Fields& fields, void* problem, TensorVisitor visit, void* state) {
  const PresentTensors call{visit, state};
  for (const Field& field : fields.all) {
    if (!has_tensors(field)) continue;
    const Role role = role_of(fields, field, problem);
    if (field.is_tensor()) {
      call(field.name, role, field.tensor(problem));
      continue;
    }
    for (TensorView& view : field.value<std::vector<TensorView>>(problem)) call(field.name, role, view);
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

namespace {

// A limit of Rules::content; none where the tensor that it names is absent.
std::optional<int64_t> limit_of(const Fields& fields, const void* problem, std::string_view word) {
  int64_t number = 0;
  if (std::from_chars(word.data(), word.data() + word.size(), number).ec == std::errc()) return number;
  const size_t dot = word.find('.');
  const Field* field = fields.find(word.substr(0, dot));
  KP_INTERNAL_CHECK(field != nullptr, word, ": no field has this name");
  if (dot == std::string_view::npos) return field->value<int64_t>(problem);
  const TensorView& view = field->tensor(problem);
  if (!view.is_present()) return std::nullopt;
  return view.sizes[static_cast<size_t>(word[dot + 1] - '0')];
}

}  // namespace

Filling detail::declared_filling(const Fields& fields, const void* problem, std::string_view tensor) {
  const Field* field = fields.find(tensor);
  std::string_view text = field == nullptr ? "" : field->rules.content;
  const std::string_view word = take_token(text);
  if (word == "positive") return {.content = Content::kPositive};
  if (word == "seeds") return {.content = Content::kSeeds};
  if (word == "places") return {.content = Content::kPlaces};
  if (word.empty()) return {};
  const Content content = word == "offsets" ? Content::kOffsets : Content::kIndices;
  for (auto limit = take_token(text); !limit.empty(); limit = take_token(text)) {
    if (const auto size = limit_of(fields, problem, limit)) return {.content = content, .limit = *size};
  }
  return {.content = content};
}

void set_device(void* device, std::string_view, Role, TensorView& view) {
  view.device = *static_cast<const Device*>(device);
}

int64_t bytes_of_fields(const Fields& fields, const void* problem) {
  int64_t bytes = 0;
  visit_fields(fields, const_cast<void*>(problem), add_tensor_bytes, &bytes);
  return bytes;
}

void shrink_fields(const Fields& fields, void* problem, int64_t elements, std::string_view dimension) {
  const Shape* leading = picked_shape(fields, leading_input(fields), problem);
  if (leading == nullptr || leading->rank == 0) return;
  const auto named = std::ranges::find(fields.dimensions, dimension, &Dimension::name);
  const int16_t cut =
      dimension.empty() ? leading->dimensions[0] : static_cast<int16_t>(named - fields.dimensions.begin());
  std::vector<int64_t*> sizes;  // of that dimension, in all tensors
  int64_t most = 1, widest = 1;
  for (const Field& field : fields.all) {
    if (!field.is_tensor() || !field.tensor(problem).is_present()) continue;
    TensorView& view = field.tensor(problem);
    const Shape* shape =
        field.like >= 0 ? picked_shape(fields, fields[field.like], problem) : picked_shape(fields, field, problem);
    if (shape == nullptr || !has_dimension(*shape, cut)) continue;
    if (view.rank != shape->rank) {
      if (field.rules.leads) return;  // the leading dimensions did not merge: requests make them merge
      continue;
    }
    const auto place = std::ranges::find(shape->dimensions, cut) - shape->dimensions.begin();
    int64_t& size = view.sizes[static_cast<size_t>(place)];
    if (size <= 0) continue;
    most = std::max(most, size);
    widest = std::max(widest, view.element_count() / size);
    sizes.push_back(&size);
  }
  const int64_t kept = std::clamp<int64_t>(elements / widest, 1, most);
  for (int64_t* size : sizes) *size = std::min(*size, kept);
  // What is computed of that dimension follows.
  DimensionSizes after(fields);
  for (const Field& field : fields.all) {
    if (field.is_tensor()) after.bind(field, field.tensor(problem), problem);
  }
  for (size_t i = 0; i < fields.dimensions.size(); ++i) {
    const int8_t option = fields.dimensions[i].option;
    if (option >= 0) after.set(static_cast<int>(i), fields[option].value<int64_t>(problem));
  }
  for (const Field& field : fields.all) {
    const bool is_tensor = field.is_tensor() && field.tensor(problem).is_present();
    const Shape* shape = is_tensor ? picked_shape(fields, field, problem) : nullptr;
    for (int i = 0; shape != nullptr && shape->rank == field.tensor(problem).rank && i < shape->rank; ++i) {
      const int16_t dimension = shape->dimensions[static_cast<size_t>(i)];
      if (dimension < 0) continue;
      const Dimension& computed = fields.dimensions[static_cast<size_t>(dimension)];
      if (computed.operation == 0 || (computed.left != cut && computed.right != cut)) continue;
      int64_t& size = field.tensor(problem).sizes[static_cast<size_t>(i)];
      size = std::min(size, after.size_of(dimension).value_or(size));
    }
  }
}

void detail::describe_declared(const Fields& fields, const void* problem, tuning::KeyBuilder& key) {
  describe_fields(fields, problem, key);
}

Cost detail::declared_cost(const Fields& fields, const void* problem, int64_t flops_per_element) {
  Cost cost{.bytes = bytes_of_fields(fields, problem)};
  if (flops_per_element > 0) cost.flops = flops_per_element * leading_input(fields).tensor(problem).element_count();
  return cost;
}

void detail::shrink_declared(const Fields& fields, const RequestForm& form, void* problem, int64_t elements) {
  if (!fields.all.empty()) shrink_fields(fields, problem, elements, form.shrinks);
}

}  // namespace kernel_pytorch::registry
