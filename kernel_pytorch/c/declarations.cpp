#include "kernel_pytorch/c/declarations.h"

#include <algorithm>

#include "kernel_pytorch/ops/operations.h"

namespace kernel_pytorch::c_interface {
namespace {

using registry::ArgumentKind;
using registry::Declaration;

const char* kind_text(FieldKind kind) {
  switch (kind) {
    case FieldKind::kTensor:
      return "tensor";
    case FieldKind::kTensorList:
      return "tensors";
    case FieldKind::kNumber:
    case FieldKind::kOptionalNumber:
      return "number";
    case FieldKind::kInteger:
    case FieldKind::kOptionalInteger:
      return "integer";
    case FieldKind::kFlag:
      return "flag";
    case FieldKind::kText:
      return "text";
    case FieldKind::kChoice:
      return "choice";
  }
  return "";
}

// ["...", "columns", 2]
Json shape_report(const Fields& fields, const Shape& shape) {
  Json report = Json::array();
  for (int i = 0; i < shape.rank; ++i) {
    const int16_t dimension = shape.dimensions[static_cast<size_t>(i)];
    if (dimension == kAnyDimensions) {
      report.push_back("...");
    } else if (dimension >= 0) {
      report.push_back(fields.dimensions[static_cast<size_t>(dimension)].name);
    } else {
      report.push_back(-2 - dimension);
    }
  }
  return report;
}

// "shapes" are the alternatives, "shape_by" the arguments that pick one. What no argument picks, the defaults do.
void add_shapes(const Declaration& declaration, const registry::Signature& signature, const Field& field,
                Json& report) {
  const Fields& fields = declaration.fields;
  const auto is_argument = [&](int8_t index) {
    return std::ranges::any_of(signature.arguments, [&](const registry::Argument& argument) {
      return argument.kind == ArgumentKind::kField && argument.field == index;
    });
  };
  const auto name_of = [&](int8_t index) {
    for (const registry::Argument& argument : signature.arguments) {
      if (argument.kind == ArgumentKind::kField && argument.field == index) return argument.name;
    }
    return fields[index].name;
  };
  Json shapes = Json::array(), shape_by = Json::array();
  const bool is_settled = field.shape_count > 1 && std::ranges::none_of(field.shape_by, is_argument);
  for (const int8_t selector : field.shape_by) {
    if (selector >= 0 && !is_settled) shape_by.push_back(name_of(selector));
  }
  const Shape* settled = is_settled ? picked_shape(fields, field, declaration.defaults()) : nullptr;
  for (int i = 0; i < field.shape_count; ++i) {
    const Shape& shape = field.shapes[static_cast<size_t>(i)];
    if (!is_settled || &shape == settled) shapes.push_back(shape_report(fields, shape));
  }
  if (!shapes.empty()) report["shapes"] = std::move(shapes);
  if (!shape_by.empty()) report["shape_by"] = std::move(shape_by);
  if (field.like >= 0) report["like"] = name_of(field.like);
  if (field.row_list >= 0) report["row"] = {name_of(field.row_list), name_of(field.row_bits)};
  if (field.order_of >= 0) report["order_of"] = name_of(field.order_of);
  if (field.type_rule == TypeRule::kFixed) report["dtype"] = kernel_pytorch::name_of(field.type);
  if (field.type_of >= 0)
    report[field.type_rule == TypeRule::kNamed ? "dtype_named" : "dtype_of"] = name_of(field.type_of);
  if (field.type_rule == TypeRule::kStatistic) report["statistic"] = true;
  if (field.type_if >= 0) report["statistic_if"] = name_of(field.type_if);
  if (field.when >= 0) report["when"] = name_of(field.when);
}

// What the struct has where a caller gives nothing.
Json default_report(const Field& field, const void* defaults) {
  switch (field.kind) {
    case FieldKind::kNumber:
      return field.value<double>(defaults);
    case FieldKind::kInteger:
      return field.value<int64_t>(defaults);
    case FieldKind::kFlag:
      return field.value<bool>(defaults);
    case FieldKind::kText:
      return field.value<std::string>(defaults);
    case FieldKind::kChoice: {
      std::string_view choices = field.rules.choices;
      for (uint8_t i = 0; i < field.value<uint8_t>(defaults); ++i) take_token(choices);
      return take_token(choices);
    }
    case FieldKind::kTensorList:
      return Json::array();
    case FieldKind::kOptionalNumber:
      if (const auto& number = field.value<std::optional<double>>(defaults)) return *number;
      return nullptr;
    case FieldKind::kOptionalInteger:
      if (const auto& number = field.value<std::optional<int64_t>>(defaults)) return *number;
      return nullptr;
    case FieldKind::kTensor:
      return nullptr;
  }
  return nullptr;
}

Json argument_report(const Declaration& declaration, const registry::Signature& signature,
                     const registry::Argument& argument) {
  Json report{{"name", argument.name}};
  if (argument.kind != ArgumentKind::kField) {
    report["kind"] = argument.kind == ArgumentKind::kWanted ? "wanted" : "type";
    return report;
  }
  const Field& field = declaration.fields[argument.field];
  report["kind"] = kind_text(field.kind);
  report["optional"] = argument.is_optional;
  report["updated"] = argument.is_updated;
  if (field.role == FieldRole::kOption || argument.is_optional || field.kind == FieldKind::kTensorList) {
    report["default"] = default_report(field, declaration.defaults());
  }
  add_shapes(declaration, signature, field, report);
  if (!field.rules.choices.empty()) report["choices"] = field.rules.choices;
  if (!field.rules.from.empty()) report["from"] = field.rules.from;
  return report;
}

// "dtype" is a type's name, "dtype_of" the argument whose type it is; "statistic": that of a sum over its elements.
Json output_report(const Declaration& declaration, const registry::Signature& signature,
                   const registry::Output& output) {
  const Field& field = declaration.fields[output.field];
  Json report{{"name", output.name}, {"saved", field.role == FieldRole::kSaved}};
  add_shapes(declaration, signature, field, report);
  if (!field.rules.dtype_option.empty()) report["dtype_option"] = field.rules.dtype_option;
  if (!field.rules.wanted.empty() && !output.is_always_made) report["wanted"] = field.rules.wanted;
  return report;
}

}  // namespace

Json report_declarations() {
  Json all = Json::array();
  for (const Declaration& declaration : declarations()) {
    const registry::Signature signature = registry::signature_of(declaration);
    Json arguments = Json::array(), outputs = Json::array();
    for (const registry::Argument& argument : signature.arguments) {
      arguments.push_back(argument_report(declaration, signature, argument));
    }
    for (const registry::Output& output : signature.outputs) {
      outputs.push_back(output_report(declaration, signature, output));
    }
    Json report{{"name", declaration.name},
                {"schema", registry::schema_of(declaration)},
                {"arguments", std::move(arguments)},
                {"outputs", std::move(outputs)}};
    for (const registry::Argument& argument : signature.arguments) {
      const bool leads = argument.kind == ArgumentKind::kField && declaration.fields[argument.field].rules.leads;
      if (leads) report["leading"] = argument.name;
    }
    all.push_back(std::move(report));
  }
  return {{"declarations", std::move(all)}};
}

}  // namespace kernel_pytorch::c_interface
