#include "kernel_pytorch/c/declarations.h"

#include "kernel_pytorch/ops/declarations.h"

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
Json shape_report(const Fields& fields, const Field& field) {
  Json shape = Json::array();
  for (int i = 0; i < field.rank; ++i) {
    const int16_t dimension = field.dimensions[static_cast<size_t>(i)];
    if (dimension == kLeadingDimensions) {
      shape.push_back("...");
    } else if (dimension >= 0) {
      shape.push_back(fields.dimension_names[static_cast<size_t>(dimension)]);
    } else {
      shape.push_back(-2 - dimension);
    }
  }
  return shape;
}

Json argument_report(const Declaration& declaration, const registry::Signature& signature,
                     const registry::Argument& argument) {
  Json report{{"name", signature.name_of(declaration.fields, argument)}};
  if (argument.kind != ArgumentKind::kField) {
    report["kind"] = argument.kind == ArgumentKind::kWanted ? "wanted" : "type";
    return report;
  }
  const Field& field = declaration.fields.all[static_cast<size_t>(argument.field)];
  report["kind"] = kind_text(field.kind);
  report["optional"] = argument.is_optional;
  report["updated"] = field.role == FieldRole::kUpdated;
  if (field.rank >= 0) report["shape"] = shape_report(declaration.fields, field);
  if (!field.rules.choices.empty()) report["choices"] = field.rules.choices;
  if (!field.rules.from.empty()) report["from"] = field.rules.from;
  return report;
}

// "dtype" is a type's name, or the argument whose type it is; "statistic": that of a sum over elements of the argument.
Json output_report(const Declaration& declaration, const Field& field) {
  const Fields& fields = declaration.fields;
  Json report{{"name", field.name},
              {"saved", field.role == FieldRole::kSaved},
              {"shape", shape_report(fields, field)},
              {"fixed_dtype", field.type_rule == TypeRule::kFixed},
              {"statistic", field.type_rule == TypeRule::kStatistic}};
  report["dtype"] =
      field.type_rule == TypeRule::kFixed ? name_of(field.type) : fields.all[static_cast<size_t>(field.type_of)].name;
  const auto add = [&](const char* name, std::string_view text) {
    if (!text.empty()) report[name] = text;
  };
  add("dtype_option", field.rules.dtype_option);
  add("when", field.rules.when);
  add("wanted", field.rules.wanted);
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
    for (int8_t output : signature.outputs) {
      outputs.push_back(output_report(declaration, declaration.fields.all[static_cast<size_t>(output)]));
    }
    all.push_back({{"name", declaration.name},
                   {"schema", registry::schema_of(declaration)},
                   {"leading", registry::leading_input(declaration.fields).name},
                   {"arguments", std::move(arguments)},
                   {"outputs", std::move(outputs)}});
  }
  return {{"declarations", std::move(all)}};
}

}  // namespace kernel_pytorch::c_interface
