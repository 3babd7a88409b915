#include "kernel_pytorch/registry/declaration.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::registry {
namespace {

// "Tensor(a!)" for the first tensor that is written, "Tensor(b!)" for the second.
std::string type_text(const Field& field, const Argument& argument, char& alias) {
  const std::string updated = argument.is_updated ? concat("(", alias++, "!)") : "";
  switch (field.kind) {
    case FieldKind::kTensor:
      return concat("Tensor", updated, argument.is_optional ? "?" : "");
    case FieldKind::kTensorList:
      return concat("Tensor", updated, "[]");
    case FieldKind::kNumber:
      return "float";
    case FieldKind::kOptionalNumber:
      return field.rules.required ? "float" : "float?";
    case FieldKind::kInteger:
      return field.rules.symbolic ? "SymInt" : "int";
    case FieldKind::kOptionalInteger:
      return field.rules.symbolic ? "SymInt?" : "int?";
    case FieldKind::kFlag:
      return "bool";
    case FieldKind::kText:
    case FieldKind::kChoice:
      return "str";
  }
  return {};
}

std::string_view name_in(const Declaration& declaration, const Field& field) {
  std::string_view text = declaration.variant.renamed;
  for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
    const size_t middle = word.find('=');
    if (word.substr(0, middle) == field.name) return word.substr(middle + 1);
  }
  return field.name;
}

bool is_hidden(const Declaration& declaration, const Field& field) {
  const Variant& variant = declaration.variant;
  if (has_word(variant.without, field.name) || has_word(variant.never, field.name)) return true;
  return field.rules.hidden && !has_word(variant.shown, field.name);
}

bool is_updated_output(const Declaration& declaration, const Field& field) {
  return field.is_output() && has_word(declaration.variant.updated, field.name);
}

bool takes_memory(const Declaration& declaration, const Field& field) {
  return declaration.variant.in_place && field.in_place >= 0;
}

bool is_returned(const Declaration& declaration, const Field& field) {
  if (!field.is_output() || is_hidden(declaration, field)) return false;
  if (is_updated_output(declaration, field) || takes_memory(declaration, field)) return false;
  if (field.role == FieldRole::kSaved && !declaration.returns_saved && field.rules.wanted.empty()) return false;
  return field.when < 0 || !has_word(declaration.variant.never, declaration.fields[field.when].name);
}

}  // namespace

const Field& leading_input(const Fields& fields) {
  const auto found = std::ranges::find_if(fields.all, [](const Field& field) { return field.rules.leads; });
  KP_INTERNAL_CHECK(found != fields.all.end(), "no tensor of a list of fields leads");
  return *found;
}

int Signature::find(std::string_view name) const {
  const auto found = std::ranges::find(arguments, name, &Argument::name);
  return found == arguments.end() ? -1 : static_cast<int>(found - arguments.begin());
}

Signature signature_of(const Declaration& declaration) {
  const auto fields = declaration.fields.all;
  Signature signature;
  const auto is_written = [&](size_t index) {
    return std::ranges::any_of(signature.in_place,
                               [&](int8_t output) { return declaration.fields[output].in_place == int(index); });
  };
  for (size_t i = 0; i < fields.size(); ++i) {
    if (takes_memory(declaration, fields[i])) signature.in_place.push_back(static_cast<int8_t>(i));
  }
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& field = fields[i];
    const bool is_given = is_updated_output(declaration, field);
    const bool is_argument = field.is_input() || field.role == FieldRole::kOption || is_given;
    if (!is_argument || is_hidden(declaration, field)) continue;
    signature.arguments.push_back({.name = name_in(declaration, field),
                                   .field = static_cast<int8_t>(i),
                                   .is_optional = (field.is_optional() || field.rules.optional) &&
                                                  !has_word(declaration.variant.always, field.name),
                                   .is_updated = field.is_updated() || is_given || is_written(i)});
  }
  const auto add_once = [&](ArgumentKind kind, size_t output, std::string_view name) {
    if (name.empty() || signature.find(name) >= 0) return;
    signature.arguments.push_back({.kind = kind, .name = name, .field = static_cast<int8_t>(output)});
  };
  for (size_t i = 0; i < fields.size(); ++i) {
    if (!is_returned(declaration, fields[i])) continue;
    signature.outputs.push_back({.name = name_in(declaration, fields[i]),
                                 .field = static_cast<int8_t>(i),
                                 .is_always_made = fields[i].role == FieldRole::kSaved && declaration.returns_saved});
    std::string_view flags = fields[i].rules.wanted;
    for (auto flag = take_token(flags); !flag.empty(); flag = take_token(flags)) {
      add_once(ArgumentKind::kWanted, i, flag);
    }
  }
  for (const Output& output : signature.outputs) {
    const auto index = static_cast<size_t>(output.field);
    add_once(ArgumentKind::kType, index, fields[index].rules.dtype_option);
  }
  return signature;
}

std::string schema_of(const Declaration& declaration) {
  const Signature signature = signature_of(declaration);
  std::string text = concat(declaration.name, "(");
  char alias = 'a';
  for (const Argument& argument : signature.arguments) {
    if (!text.ends_with('(')) text += ", ";
    switch (argument.kind) {
      case ArgumentKind::kField:
        text += concat(type_text(declaration.fields[argument.field], argument, alias), " ", argument.name);
        break;
      case ArgumentKind::kWanted:
        text += concat("bool ", argument.name);
        break;
      case ArgumentKind::kType:
        text += concat("ScalarType? ", argument.name, "=None");
        break;
    }
  }
  text += ") -> ";
  if (signature.outputs.size() == 1) return text + "Tensor";
  text += "(";
  for (const Output& output : signature.outputs) {
    if (!text.ends_with('(')) text += ", ";
    text += concat("Tensor ", output.name);
  }
  return text + ")";
}

}  // namespace kernel_pytorch::registry
