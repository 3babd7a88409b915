// Reads what a front end measured of a training step, asks plan/activation_plan, answers.
#include "kernel_pytorch/c/plans/field_rows.h"
#include "kernel_pytorch/c/plans/request.h"
#include "kernel_pytorch/plan/activation_plan.h"

namespace kernel_pytorch::c_interface {
namespace {

std::vector<int64_t> places(FieldReader& fields, std::string_view field) {
  std::vector<int64_t> read;
  for (double value : numbers(fields, field)) read.push_back(static_cast<int64_t>(value));
  return read;
}

int64_t place(FieldReader& fields, std::string_view field, int64_t fallback) {
  return static_cast<int64_t>(fields.number(field, static_cast<double>(fallback), -1, 1e9));
}

plan::Activation read_activation(const Json& value) {
  FieldReader fields(value, "activation_plan activation");
  plan::Activation one{.bytes = fields.number("bytes", 0, 0, kMost),
                       .op = place(fields, "op", -1),
                       .dies = place(fields, "dies", 0),
                       .recompute_us = fields.number("recompute_us", 0, 0, kMost),
                       .can_recompute = fields.boolean("can_recompute", false),
                       .can_move = fields.boolean("can_move", false),
                       .inputs = places(fields, "inputs"),
                       .reads = places(fields, "reads")};
  fields.finish();
  return one;
}

plan::BlockKind read_kind(const Json& value) {
  FieldReader fields(value, "activation_plan kind");
  plan::BlockKind kind{.activations = read_all(fields, "activations", read_activation),
                       .forward_us = fields.number("forward_us", 0, 0, kMost),
                       .backward_us = fields.number("backward_us", 0, 0, kMost),
                       .forward_bytes = numbers(fields, "forward_bytes"),
                       .backward_at = numbers(fields, "backward_at"),
                       .backward_greatest = numbers(fields, "backward_greatest")};
  fields.finish();
  return kind;
}

plan::ChainBlock read_block(const Json& value) {
  FieldReader fields(value, "activation_plan block");
  const plan::ChainBlock block{.kind = place(fields, "kind", 0),
                               .forward_start = fields.number("forward_start", 0, 0, kMost),
                               .backward_start = fields.number("backward_start", 0, 0, kMost)};
  fields.finish();
  return block;
}

}  // namespace

Json answer_activation_plan(const Json& request) {
  FieldReader fields(request, "activation_plan");
  const plan::ActivationRequest asked{.kinds = read_all(fields, "kinds", read_kind),
                                      .chain = read_all(fields, "chain", read_block),
                                      .between = fields.number("between", 0, 0, kMost),
                                      .outside = fields.number("outside", 0, 0, kMost),
                                      .budget_bytes = fields.number("budget_bytes", 0, 0, kMost),
                                      .to_host = fields.number("to_host", 0, 0, kMost),
                                      .to_device = fields.number("to_device", 0, 0, kMost),
                                      .step_us = fields.number("step_us", 0, 0, kMost)};
  fields.finish();
  const plan::ActivationPlan found = plan::plan_activations(asked);
  Json blocks = Json::array();
  for (const plan::BlockPlan& block : found.blocks) {
    Json treatments = Json::array();
    for (plan::Treatment one : block.treatments) {
      treatments.push_back(std::string(plan::kTreatmentNames[static_cast<size_t>(one)]));
    }
    blocks.push_back({{"treatments", treatments},
                      {"held_bytes", block.held_bytes},
                      {"moved_bytes", block.moved_bytes},
                      {"recompute_us", block.recompute_us}});
  }
  return {{"fits", found.fits},
          {"is_exact", found.is_exact},
          {"peak_bytes", found.peak_bytes},
          {"step_us", found.step_us},
          {"recompute_us", found.recompute_us},
          {"stall_us", found.stall_us},
          {"kept_bytes", found.kept_bytes},
          {"moved_bytes", found.moved_bytes},
          {"least_bytes", found.least_bytes},
          {"everything_bytes", found.everything_bytes},
          {"reason", found.reason},
          {"blocks", blocks}};
}

}  // namespace kernel_pytorch::c_interface
