#include "kernel_pytorch/plan/optimize/model_plan.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kCpuLaunchUs = 3, kCudaLaunchUs = 4;     // what an op of torch costs besides its work
constexpr double kHopeless = 1.5;                         // predicted this many times slower: not tried
constexpr double kTurns = 40, kLeastTurnsUs = 20e3;       // runs of each side, and the least that a clock can tell
constexpr double kShareOfBudget = 0.5, kMostSeconds = 3;  // of the budget for all parts, and for one
constexpr double kLeastShareOnCpu = 0.002;                // of the budget, for one: others' work disturbs a CPU's clock

std::string amount(double value, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T"};
  int prefix = 0;
  while (value >= 1000 && prefix < 4) {
    value /= 1000;
    ++prefix;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(value < 10 && prefix > 0 ? 1 : 0) << value << ' ' << kPrefixes[prefix]
       << unit;
  return text.str();
}

std::string ratio_text(double ratio) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << ratio << 'x';
  return text.str();
}

std::string launches_text(int64_t launches) {
  return concat(launches, launches == 1 ? " launch" : " launches");
}

std::string gain_text(const Site& site, const SiteDecision& decision) {
  return concat(amount(site.before.bytes, "B"), " and ", launches_text(site.before.launches), " before, ",
                amount(site.after.bytes, "B"), " and ", launches_text(site.after.launches),
                " after: ", ratio_text(decision.before_us / std::max(decision.after_us, 1e-9)), " predicted");
}

void check(const Site& site) {
  for (const Work* work : {&site.before, &site.after}) {
    KP_CHECK(work->bytes >= 0 && work->flops >= 0 && work->float8_flops >= 0 && work->launches >= 0,
             "model plan: ", site.path, " (", site.pattern, ") moves ", work->bytes, " bytes in ", work->launches,
             " launches; neither may be negative");
  }
}

SiteDecision decide(const Site& site, const Machine& machine, const Purpose& purpose) {
  SiteDecision decision;
  decision.before_us = predicted_us(site.before, machine);
  decision.after_us = predicted_us(site.after, machine);
  if (site.approximate && !purpose.tolerant) {
    decision.reason = "it rounds more than the model does; accuracy=\"tolerant\" would try it";
    return decision;
  }
  if (decision.after_us > decision.before_us * kHopeless) {
    decision.reason = concat("nothing to gain: ", gain_text(site, decision));
    return decision;
  }
  decision.tries = true;
  decision.only_as_a_whole = purpose.compiled && site.pointwise;
  decision.reason = gain_text(site, decision);
  if (decision.only_as_a_whole) decision.reason += "; a compiler fuses such parts, so the whole must be faster";
  return decision;
}

// Seconds for each kind: some runs of both sides, and together no more than a share of the budget.
void share_budget(const std::vector<Site>& sites, const Machine& machine, const Purpose& purpose,
                  std::vector<SiteDecision>& decisions) {
  std::map<int64_t, double> wanted;
  const double least_us =
      machine.is_cuda ? kLeastTurnsUs : std::max(kLeastTurnsUs, kLeastShareOnCpu * purpose.budget_seconds * 1e6);
  for (const SiteDecision& decision : decisions) {
    if (!decision.tries) continue;
    const double us = std::max(kTurns * (decision.before_us + decision.after_us), least_us);
    double& most = wanted[sites[static_cast<size_t>(decision.site)].kind];
    most = std::max(most, std::min(us / 1e6, kMostSeconds));
  }
  double total = 0;
  for (const auto& [kind, seconds] : wanted) total += seconds;
  const double allowed = purpose.budget_seconds * kShareOfBudget;
  const double scale = total > allowed ? allowed / total : 1;
  for (SiteDecision& decision : decisions) {
    if (decision.tries) decision.measure_seconds = wanted[sites[static_cast<size_t>(decision.site)].kind] * scale;
  }
}

}  // namespace

double predicted_us(const Work& work, const Machine& machine) {
  const double launch_us = machine.is_cuda ? kCudaLaunchUs : kCpuLaunchUs;
  const double float8_rate =
      machine.float8_flops_per_second > 0 ? machine.float8_flops_per_second : machine.flops_per_second;
  const double seconds =
      work.bytes / machine.bytes_per_second + work.flops / machine.flops_per_second + work.float8_flops / float8_rate;
  return seconds * 1e6 + static_cast<double>(work.launches) * launch_us;
}

ModelPlan plan_model(const std::vector<Site>& sites, const Machine& machine, const Purpose& purpose) {
  KP_CHECK(machine.bytes_per_second > 0 && machine.flops_per_second > 0, "model plan: the machine moves ",
           machine.bytes_per_second, " bytes and computes ", machine.flops_per_second,
           " operations in a second; both must be positive");
  KP_CHECK(purpose.budget_seconds >= 0, "model plan: the budget is ", purpose.budget_seconds,
           " seconds; it cannot be negative");
  ModelPlan plan;
  for (size_t i = 0; i < sites.size(); ++i) {
    check(sites[i]);
    plan.decisions.push_back(decide(sites[i], machine, purpose));
    plan.decisions.back().site = static_cast<int64_t>(i);
  }
  share_budget(sites, machine, purpose, plan.decisions);
  if (purpose.compiled) {
    plan.notes.emplace_back(
        "torch.compile stands around the model: parts are chosen by the time of the whole, compiled with and without");
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
