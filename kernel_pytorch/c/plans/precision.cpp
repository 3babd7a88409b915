// Reads what a front end measured of layers in several formats, asks plan/precision_plan, answers.
#include "kernel_pytorch/c/plans/field_rows.h"
#include "kernel_pytorch/c/plans/request.h"
#include "kernel_pytorch/plan/precision_plan.h"

namespace kernel_pytorch::c_interface {
namespace {

std::vector<plan::FormatChoice> read_layer(const Json& value) {
  FieldReader fields(value, "precision_plan layer");
  const std::vector<double> bytes = numbers(fields, "bytes"), errors = numbers(fields, "errors");
  fields.finish();
  KP_CHECK(bytes.size() == errors.size(), "precision_plan layer: there are ", bytes.size(), " \"bytes\" and ",
           errors.size(), " \"errors\"; each choice has one of both");
  std::vector<plan::FormatChoice> choices;
  for (size_t i = 0; i < bytes.size(); ++i) choices.push_back({static_cast<int64_t>(bytes[i]), errors[i]});
  return choices;
}

}  // namespace

Json answer_precision_plan(const Json& request) {
  FieldReader fields(request, "precision_plan");
  const plan::PrecisionRequest asked{.layers = read_all(fields, "layers", read_layer),
                                     .budget_bytes = static_cast<int64_t>(fields.number("budget_bytes", 0, 0, kMost))};
  fields.finish();
  const plan::PrecisionPlan found = plan::plan_precision(asked);
  return {{"fits", found.fits},    {"is_exact", found.is_exact}, {"choices", found.choices},
          {"bytes", found.bytes},  {"error", found.error},       {"least_bytes", found.least_bytes},
          {"reason", found.reason}};
}

}  // namespace kernel_pytorch::c_interface
