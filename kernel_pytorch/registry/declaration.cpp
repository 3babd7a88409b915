#include "kernel_pytorch/registry/declaration.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::registry {
namespace {

// "Tensor(a!)" for the first tensor that is written, "Tensor(b!)" for the second.
std::string type_text(const Field& field, bool is_optional, char& alias) {
  const std::string updated = field.role == FieldRole::kUpdated ? concat("(", alias++, "!)") : "";
  const char* question = is_optional ? "?" : "";
  switch (field.kind) {
    case FieldKind::kTensor:
      return concat("Tensor", updated, question);
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

bool is_returned(const Declaration& declaration, const Field& field) {
  if (!field.is_output() || field.rules.hidden) return false;
  if (field.role == FieldRole::kSaved && !declaration.returns_saved) return false;
  const bool depends_on_fixed = field.when >= 0 && field.when == declaration.fixed;
  return !depends_on_fixed || declaration.is_given;
}

}  // namespace

const Field& leading_input(const Fields& fields) {
  const auto found = std::ranges::find_if(fields.all, [](const Field& field) { return field.rules.leads; });
  KP_INTERNAL_CHECK(found != fields.all.end(), "no tensor of a list of fields leads");
  return *found;
}

std::string_view Signature::name_of(const Fields& fields, const Argument& argument) const {
  const Field& field = fields.all[static_cast<size_t>(argument.field)];
  if (argument.kind == ArgumentKind::kWanted) return field.rules.wanted;
  return argument.kind == ArgumentKind::kType ? field.rules.dtype_option : field.name;
}

Signature signature_of(const Declaration& declaration) {
  const auto fields = declaration.fields.all;
  Signature signature;
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& field = fields[i];
    const bool is_fixed = static_cast<int>(i) == declaration.fixed;
    const bool is_argument = field.is_input() || field.role == FieldRole::kOption;
    if (!is_argument || field.rules.hidden || (is_fixed && !declaration.is_given)) continue;
    signature.arguments.push_back(
        {.field = static_cast<int8_t>(i), .is_optional = field.role == FieldRole::kOptionalInput && !is_fixed});
  }
  const auto add_once = [&](ArgumentKind kind, size_t output, std::string_view name) {
    const bool is_known = std::ranges::any_of(signature.arguments, [&](const Argument& argument) {
      return argument.kind == kind && signature.name_of(declaration.fields, argument) == name;
    });
    if (!name.empty() && !is_known) signature.arguments.push_back({.kind = kind, .field = static_cast<int8_t>(output)});
  };
  for (size_t i = 0; i < fields.size(); ++i) {
    if (!is_returned(declaration, fields[i])) continue;
    signature.outputs.push_back(static_cast<int8_t>(i));
    add_once(ArgumentKind::kWanted, i, fields[i].rules.wanted);
  }
  for (int8_t output : signature.outputs) {
    const auto index = static_cast<size_t>(output);
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
    const Field& field = declaration.fields.all[static_cast<size_t>(argument.field)];
    const std::string_view name = signature.name_of(declaration.fields, argument);
    switch (argument.kind) {
      case ArgumentKind::kField:
        text += concat(type_text(field, argument.is_optional, alias), " ", name);
        break;
      case ArgumentKind::kWanted:
        text += concat("bool ", name);
        break;
      case ArgumentKind::kType:
        text += concat("ScalarType? ", name, "=None");
        break;
    }
  }
  text += ") -> ";
  if (signature.outputs.size() == 1) return text + "Tensor";
  text += "(";
  for (int8_t output : signature.outputs) {
    if (!text.ends_with('(')) text += ", ";
    text += concat("Tensor ", declaration.fields.all[static_cast<size_t>(output)].name);
  }
  return text + ")";
}

}  // namespace kernel_pytorch::registry
