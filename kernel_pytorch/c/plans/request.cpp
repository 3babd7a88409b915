#include "kernel_pytorch/c/plans/request.h"

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/c/plans/field_rows.h"
#include "kernel_pytorch/plan/bucket_plan.h"
#include "kernel_pytorch/plan/context_parallel_plan.h"
#include "kernel_pytorch/plan/float8_plan.h"
#include "kernel_pytorch/plan/graph_plan.h"
#include "kernel_pytorch/plan/memory_plan.h"
#include "kernel_pytorch/plan/offload_plan.h"
#include "kernel_pytorch/plan/optimize/budget_plan.h"
#include "kernel_pytorch/plan/optimize/model_plan.h"
#include "kernel_pytorch/plan/optimize/tuning_plan.h"
#include "kernel_pytorch/plan/optimize/verdict.h"

namespace kernel_pytorch::c_interface {
namespace {

std::vector<int64_t> whole_numbers(FieldReader& fields, std::string_view field) {
  std::vector<int64_t> read;
  for (double value : numbers(fields, field)) {
    KP_CHECK(value == std::floor(value), fields.where(), ": \"", field, "\" has ", value, " in it, no whole number");
    read.push_back(static_cast<int64_t>(value));
  }
  return read;
}

int64_t whole_number(FieldReader& fields, std::string_view field, int64_t fallback) {
  return static_cast<int64_t>(fields.number(field, static_cast<double>(fallback), 0, 1e12));
}

plan::Work read_work(FieldReader& site, std::string_view field) {
  const Json* value = site.value(field);
  if (value == nullptr) return {};
  FieldReader fields(*value, "model_plan work");
  const plan::Work work{.bytes = fields.number("bytes", 0, 0, kMost),
                        .flops = fields.number("flops", 0, 0, kMost),
                        .float8_flops = fields.number("float8_flops", 0, 0, kMost),
                        .launches = whole_number(fields, "launches", 0)};
  fields.finish();
  return work;
}

plan::Site read_site(const Json& value) {
  FieldReader fields(value, "model_plan site");
  const plan::Site site{.path = fields.text("path", ""),
                        .pattern = fields.text("pattern", ""),
                        .kind = whole_number(fields, "kind", 0),
                        .before = read_work(fields, "before"),
                        .after = read_work(fields, "after"),
                        .pointwise = fields.boolean("pointwise", false),
                        .approximate = fields.boolean("approximate", false)};
  fields.finish();
  return site;
}

plan::TunableProblem read_tunable(const Json& value) {
  FieldReader fields(value, "tuning_plan problem");
  plan::TunableProblem problem{.op = fields.text("op", ""),
                               .problem = fields.text("problem", ""),
                               .calls = whole_number(fields, "calls", 1),
                               .candidates = whole_number(fields, "candidates", 0),
                               .bytes = fields.number("bytes", 0, 0, kMost),
                               .flops = fields.number("flops", 0, 0, kMost),
                               .decided = fields.boolean("decided", false)};
  fields.finish();
  return problem;
}

plan::Timing read_timing(FieldReader& comparison, std::string_view field) {
  const Json* value = comparison.value(field);
  KP_CHECK(value != nullptr, comparison.where(), ": \"", field, "\" is missing");
  FieldReader fields(*value, "verdict timing");
  const plan::Timing timing{.median_us = fields.number("median_us", 0, 0, kMost),
                            .low_us = fields.number("low_us", 0, 0, kMost),
                            .high_us = fields.number("high_us", 0, 0, kMost)};
  fields.finish();
  return timing;
}

plan::Comparison read_comparison(const Json& value) {
  FieldReader fields(value, "verdict comparison");
  const plan::Comparison comparison{.before = read_timing(fields, "before"),
                                    .after = read_timing(fields, "after"),
                                    .sure_gain = fields.number("sure_gain", 0, 0, kMost)};
  fields.finish();
  return comparison;
}

plan::WayClocks read_way(const Json& value) {
  FieldReader fields(value, "verdict way");
  plan::WayClocks clocks = read_all(fields, "clocks", read_comparison);
  fields.finish();
  return clocks;
}

plan::Machine read_machine(FieldReader& fields) {
  return {.bytes_per_second = fields.number("copy_bytes_per_second", 0, 0, kMost),
          .flops_per_second = fields.number("matmul_flops_per_second", 0, 0, kMost),
          .float8_flops_per_second = fields.number("float8_flops_per_second", 0, 0, kMost),
          .is_cuda = fields.boolean("is_cuda", false)};
}

Json finite_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);  // JSON has no infinity
}

}  // namespace

Json answer_float8_plan(const Json& request) {
  FieldReader fields(request, "float8_plan");
  constexpr double kMostRows = 1e12;
  const plan::LinearShape shape{static_cast<int64_t>(fields.number("tokens", 8192, 1, kMostRows)),
                                static_cast<int64_t>(fields.number("in_features", 0, 1, kMostRows)),
                                static_cast<int64_t>(fields.number("out_features", 0, 1, kMostRows))};
  const Device device = device_from(fields.text("device", "cpu"));
  const std::string recipe = fields.text("recipe", "delayed");
  fields.finish();
  const plan::Float8Plan found = plan::plan_float8(shape, plan::recipe_of(recipe), device_info(device));
  return {{"runs", found.runs},           {"pays", found.pays},     {"bf16_us", found.bf16_us},
          {"float8_us", found.float8_us}, {"kernel", found.kernel}, {"reason", found.reason}};
}

Json answer_bucket_plan(const Json& request) {
  FieldReader fields(request, "bucket_plan");
  plan::BucketRequest asked;
  const std::vector<int64_t> lengths = whole_numbers(fields, "lengths");
  const std::vector<double> counts = numbers(fields, "counts");
  KP_CHECK(counts.empty() || counts.size() == lengths.size(), "bucket_plan: there are ", lengths.size(),
           " lengths and ", counts.size(), " counts");
  for (size_t i = 0; i < lengths.size(); ++i) asked.lengths.push_back({lengths[i], counts.empty() ? 1 : counts[i]});
  asked.strategy = plan::bucket_strategy_of(fields.text("strategy", "optimal"));
  asked.max_buckets = whole_number(fields, "max_buckets", asked.max_buckets);
  asked.alignment = whole_number(fields, "alignment", asked.alignment);
  asked.longest = whole_number(fields, "longest", asked.longest);
  asked.least_gain = fields.number("least_gain", asked.least_gain, 0, 1);
  asked.current = whole_numbers(fields, "current");
  if (const Json* cost = fields.value("cost")) {
    FieldReader parts(*cost, "bucket_plan cost");
    asked.cost = {.floor = parts.number("floor", 0, 0, kMost),
                  .linear = parts.number("linear", 0, 0, kMost),
                  .quadratic = parts.number("quadratic", 0, 0, kMost),
                  .bucket = parts.number("bucket", 0, 0, kMost)};
    parts.finish();
  }
  const Device device = device_from(fields.text("device", "cpu"));
  fields.finish();
  const plan::BucketPlan found = plan::plan_buckets(asked, device_info(device));
  return {{"buckets", found.buckets},
          {"cost", found.cost},
          {"unpadded_cost", found.unpadded_cost},
          {"padding_overhead", found.padding_overhead},
          {"current_cost", found.current_cost},
          {"changes", found.changes},
          {"reason", found.reason}};
}

Json answer_graph_plan(const Json& request) {
  FieldReader fields(request, "graph_plan");
  plan::GraphRequest asked;
  asked.is_cuda = device_from(fields.text("device", "cpu")).kind == DeviceKind::kCuda;
  asked.eager_us = fields.number("eager_us", 0, 0, kMost);
  asked.device_us = fields.number("device_us", 0, 0, kMost);
  asked.launches = fields.number("launches", 0, 0, kMost);
  asked.copies = fields.number("copies", asked.copies, 0, kMost);
  asked.copy_bytes = fields.number("copy_bytes", 0, 0, kMost);
  asked.capture_us = fields.number("capture_us", 0, 0, kMost);
  asked.calls = fields.number("calls", asked.calls, 0, kMost);
  asked.least_gain = fields.number("least_gain", asked.least_gain, 0, 1);
  fields.finish();
  const plan::GraphPlan found = plan::plan_graph(asked);
  return {{"pays", found.pays},
          {"graph_us", found.graph_us},
          {"break_even_calls", finite_or_null(found.break_even_calls)},
          {"reason", found.reason}};
}

Json answer_memory_plan(const Json& request) {
  FieldReader fields(request, "memory_plan");
  const std::vector<int64_t> bytes = whole_numbers(fields, "bytes"), kinds = whole_numbers(fields, "kinds");
  fields.finish();
  KP_CHECK(bytes.size() == kinds.size(), "memory_plan: there are ", bytes.size(), " bytes and ", kinds.size(),
           " kinds");
  std::vector<plan::MemoryEvent> events;
  for (size_t i = 0; i < bytes.size(); ++i) {
    KP_CHECK(kinds[i] >= 0 && kinds[i] < static_cast<int64_t>(plan::kMemoryKindNames.size()), "memory_plan: a kind is ",
             kinds[i], "; they are numbered from 0 to ", plan::kMemoryKindNames.size() - 1);
    events.push_back({bytes[i], static_cast<plan::MemoryKind>(kinds[i])});
  }
  const plan::MemoryPlan found = plan::plan_memory(events);
  Json at_peak = Json::object();
  for (size_t i = 0; i < found.bytes_at_peak.size(); ++i) {
    at_peak[std::string(plan::kMemoryKindNames[i])] = found.bytes_at_peak[i];
  }
  return {{"peak_bytes", found.peak_bytes}, {"at_peak", at_peak}, {"left_bytes", found.left_bytes}};
}

Json answer_context_parallel_plan(const Json& request) {
  FieldReader fields(request, "context_parallel_plan");
  plan::ContextParallelRequest asked;
  const std::pair<const char*, int64_t*> counts[] = {
      {"members", &asked.members},       {"batch", &asked.batch},
      {"sequence", &asked.sequence},     {"heads", &asked.heads},
      {"key_heads", &asked.key_heads},   {"size", &asked.size},
      {"value_size", &asked.value_size}, {"element_bytes", &asked.element_bytes}};
  for (const auto& [name, field] : counts) *field = whole_number(fields, name, *field);
  asked.window = static_cast<int64_t>(fields.number("window", -1, -1, 1e12));
  asked.causal = fields.boolean("causal", false);
  asked.backward = fields.boolean("backward", false);
  asked.flops_per_second = fields.number("flops_per_second", asked.flops_per_second, 0, kMost);
  asked.link_bytes_per_second = fields.number("link_bytes_per_second", asked.link_bytes_per_second, 0, kMost);
  asked.memory_bytes_per_second = fields.number("memory_bytes_per_second", asked.memory_bytes_per_second, 0, kMost);
  asked.message_us = fields.number("message_us", asked.message_us, 0, kMost);
  asked.free_bytes = fields.number("free_bytes", 0, 0, kMost);
  fields.finish();
  const plan::ContextParallelPlan found = plan::plan_context_parallel(asked);
  Json schedules = Json::array();
  for (const plan::ScheduleCost& cost : found.schedules) {
    schedules.push_back({{"schedule", cost.schedule},
                         {"us", cost.us},
                         {"work_us", cost.work_us},
                         {"exposed_us", cost.exposed_us},
                         {"merge_us", cost.merge_us},
                         {"sent_bytes", cost.sent_bytes},
                         {"memory_bytes", cost.memory_bytes},
                         {"obstacle", cost.obstacle}});
  }
  return {{"schedule", found.schedule}, {"reason", found.reason}, {"schedules", schedules}};
}

Json answer_offload_plan(const Json& request) {
  FieldReader fields(request, "offload_plan");
  plan::OffloadRequest asked;
  const auto read = [](const Json& part, const char* name,
                       std::initializer_list<std::pair<const char*, double*>> numbers) {
    FieldReader parts(part, name);
    for (const auto& [field, number] : numbers) *number = parts.number(field, 0, 0, kMost);
    parts.finish();
  };
  const auto read_bytes = [&](const char* name, plan::OffloadBytes& bytes) {
    if (const Json* part = fields.value(name)) {
      read(*part, name, {{"up", &bytes.up}, {"down", &bytes.down}, {"host_memory", &bytes.host_memory}});
    }
  };
  asked.elements = fields.number("elements", 0, 0, kMost);
  asked.subgroup_elements = fields.number("subgroup_elements", 0, 0, kMost);
  asked.device_share = fields.number("device_share", -1, -1, 1);
  if (const Json* rates = fields.value("rates")) {
    read(*rates, "offload_plan rates",
         {{"up", &asked.rates.up},
          {"down", &asked.rates.down},
          {"host_memory", &asked.rates.host_memory},
          {"cpu", &asked.rates.cpu},
          {"device", &asked.rates.device}});
  }
  read_bytes("on_device", asked.on_device);
  read_bytes("on_cpu", asked.on_cpu);
  fields.finish();
  const plan::OffloadPlan found = plan::plan_offload(asked);
  return {{"subgroups", found.subgroups},
          {"on_device", found.on_device},
          {"bound_seconds", found.bound_seconds},
          {"bound_share", found.bound_share},
          {"predicted_seconds", found.predicted_seconds},
          {"limit", found.limit},
          {"reason", found.reason}};
}

Json answer_batch_plan(const Json& request) {
  FieldReader fields(request, "batch_plan");
  plan::BatchRequest asked;
  asked.first_batch = whole_number(fields, "first_batch", asked.first_batch);
  asked.second_batch = whole_number(fields, "second_batch", asked.second_batch);
  asked.first_bytes = fields.number("first_bytes", 0, 0, kMost);
  asked.second_bytes = fields.number("second_bytes", 0, 0, kMost);
  asked.capacity_bytes = fields.number("capacity_bytes", 0, 0, kMost);
  asked.reserve = fields.number("reserve", asked.reserve, 0, 1);
  asked.fixed_us = fields.number("fixed_us", 0, 0, kMost);
  asked.sample_us = fields.number("sample_us", 0, 0, kMost);
  fields.finish();
  const plan::BatchPlan found = plan::plan_batch(asked);
  return {{"batch", found.batch}, {"fits", found.fits}, {"reason", found.reason}};
}

Json answer_model_plan(const Json& request) {
  FieldReader fields(request, "model_plan");
  const std::vector<plan::Site> sites = read_all(fields, "sites", read_site);
  const plan::Machine machine = read_machine(fields);
  const plan::Purpose purpose{.tolerant = fields.boolean("tolerant", false),
                              .compiled = fields.boolean("compiled", false),
                              .budget_seconds = fields.number("budget_seconds", 60, 0, 1e6)};
  fields.finish();
  const plan::ModelPlan found = plan::plan_model(sites, machine, purpose);
  Json decisions = Json::array();
  for (const plan::SiteDecision& one : found.decisions) {
    decisions.push_back({{"site", one.site},
                         {"tries", one.tries},
                         {"only_as_a_whole", one.only_as_a_whole},
                         {"before_us", one.before_us},
                         {"after_us", one.after_us},
                         {"measure_seconds", one.measure_seconds},
                         {"reason", one.reason}});
  }
  return {{"decisions", decisions}, {"notes", found.notes}};
}

Json answer_tuning_plan(const Json& request) {
  FieldReader fields(request, "tuning_plan");
  const std::vector<plan::TunableProblem> problems = read_all(fields, "problems", read_tunable);
  const plan::Machine machine = read_machine(fields);
  const double step_us = fields.number("step_us", 0, 0, kMost);
  const double budget_seconds = fields.number("budget_seconds", 0, 0, 1e6);
  fields.finish();
  Json decisions = Json::array();
  for (const plan::TuningDecision& one : plan::plan_tuning(problems, machine, step_us, budget_seconds)) {
    decisions.push_back({{"problem", one.problem},
                         {"tunes", one.tunes},
                         {"listed", one.listed},
                         {"share", one.share},
                         {"seconds", one.seconds},
                         {"reason", one.reason}});
  }
  return {{"decisions", decisions}};
}

Json answer_budget_plan(const Json& request) {
  FieldReader fields(request, "budget_plan");
  const plan::BudgetRequest asked{.seconds = fields.number("seconds", 0, 0, 1e9),
                                  .step_seconds = fields.number("step_seconds", 0, 0, 1e9),
                                  .passed_seconds = fields.number("passed_seconds", 0, 0, 1e9)};
  fields.finish();
  const plan::BudgetPlan found = plan::plan_budget(asked);
  Json stages = Json::object();
  for (size_t i = 0; i < found.stages.size(); ++i) {
    stages[std::string(plan::kStageNames[i])] = {{"until_seconds", found.stages[i].until_seconds},
                                                 {"measure_seconds", found.stages[i].measure_seconds}};
  }
  return {{"is_too_small", found.is_too_small},   {"final_runs", found.final_runs},
          {"final_seconds", found.final_seconds}, {"enough_seconds", found.enough_seconds},
          {"most_seconds", found.most_seconds},   {"stages", stages}};
}

Json answer_part_verdict(const Json& request) {
  FieldReader fields(request, "part_verdict");
  const std::vector<plan::WayClocks> ways = read_all(fields, "ways", read_way);
  const double predicted_us = fields.number("predicted_us", 0, -kMost, kMost);
  fields.finish();
  const plan::PartVerdict found = plan::judge_part(ways, predicted_us);
  return {{"way", found.way}, {"maybe", found.maybe}, {"costs_calls", found.costs_calls}};
}

Json answer_whole_verdict(const Json& request) {
  FieldReader fields(request, "whole_verdict");
  const plan::Comparison comparison{.before = read_timing(fields, "before"),
                                    .after = read_timing(fields, "after"),
                                    .sure_gain = fields.number("sure_gain", 0, 0, kMost)};
  const double expected_us = fields.number("expected_us", 0, -kMost, kMost);
  fields.finish();
  return {{"pays", plan::pays(comparison)},
          {"is_faster", plan::is_faster(comparison)},
          {"confirms_tuning", plan::confirms_tuning(comparison, expected_us)}};
}

}  // namespace kernel_pytorch::c_interface
