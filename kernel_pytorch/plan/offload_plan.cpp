#include "kernel_pytorch/plan/offload_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <vector>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

// Seconds per element of a resource: `at_zero` with nothing on the device, `at_one` with everything.
struct Line {
  double at_zero, at_one;
  double at(double share) const { return at_zero + share * (at_one - at_zero); }
};

using Lines = std::array<Line, kOffloadLimits.size()>;

Lines lines_of(const OffloadRequest& request) {
  const OffloadRates& rates = request.rates;
  const OffloadBytes &cpu = request.on_cpu, &device = request.on_device;
  return {{{cpu.up / rates.up, device.up / rates.up},
           {cpu.down / rates.down, device.down / rates.down},
           {cpu.host_memory / rates.host_memory, device.host_memory / rates.host_memory},
           {1 / rates.cpu, 0},
           {0, 1 / rates.device}}};
}

size_t limit_at(const Lines& lines, double share) {
  size_t most = 0;
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].at(share) > lines[most].at(share)) most = i;
  }
  return most;
}
double largest_at(const Lines& lines, double share) {
  return lines[limit_at(lines, share)].at(share);
}

double best_share(const Lines& lines) {
  std::vector<double> candidates{0, 1};
  for (size_t i = 0; i < lines.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const double slopes = (lines[i].at_one - lines[i].at_zero) - (lines[j].at_one - lines[j].at_zero);
      const double crossing = (lines[j].at_zero - lines[i].at_zero) / slopes;
      if (slopes != 0 && crossing > 0 && crossing < 1) candidates.push_back(crossing);
    }
  }
  return *std::ranges::min_element(candidates, {}, [&](double share) { return largest_at(lines, share); });
}

// Both ways as pipelines of whole subgroups, and what they share.
double predicted(const OffloadRequest& request, const Lines& lines, int64_t subgroups, int64_t on_device) {
  const OffloadRates& rates = request.rates;
  const double size = request.elements / static_cast<double>(subgroups),
               share = static_cast<double>(on_device) / static_cast<double>(subgroups);
  double longest = request.elements * largest_at(lines, share);
  if (on_device > 0) {
    const double up = request.on_device.up / rates.up, down = request.on_device.down / rates.down;
    const double slowest = std::max({up, down, 1 / rates.device});
    longest = std::max(longest, size * (up + 1 / rates.device + down + static_cast<double>(on_device - 1) * slowest));
  }
  if (on_device < subgroups) {
    const double up = request.on_cpu.up / rates.up, down = request.on_cpu.down / rates.down;
    longest = std::max(longest, size * (up + down + static_cast<double>(subgroups - on_device) / rates.cpu));
  }
  return longest;
}

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << seconds * 1e3 << " ms";
  return text.str();
}

void check(const OffloadRequest& request) {
  const OffloadRates& rates = request.rates;
  for (double rate : {rates.up, rates.down, rates.host_memory, rates.cpu, rates.device, request.elements,
                      request.subgroup_elements}) {
    KP_CHECK(rate > 0 && std::isfinite(rate), "offload plan: a rate or a count is ", rate, "; all are positive");
  }
  for (const OffloadBytes& bytes : {request.on_cpu, request.on_device}) {
    for (double part : {bytes.up, bytes.down, bytes.host_memory}) {
      KP_CHECK(part >= 0 && std::isfinite(part), "offload plan: bytes per element are ", part, "; all are 0 or more");
    }
  }
  KP_CHECK(request.device_share <= 1, "offload plan: device_share is ", request.device_share,
           "; it is at most 1, or below 0 to be chosen");
}

}  // namespace

OffloadPlan plan_offload(const OffloadRequest& request) {
  check(request);
  const Lines lines = lines_of(request);
  OffloadPlan plan;
  plan.subgroups = std::max<int64_t>(std::llround(std::ceil(request.elements / request.subgroup_elements)), 1);
  const bool is_given = request.device_share >= 0;
  plan.bound_share = is_given ? request.device_share : best_share(lines);
  plan.bound_seconds = request.elements * largest_at(lines, plan.bound_share);
  const double wished = plan.bound_share * static_cast<double>(plan.subgroups);
  // Of the whole numbers of subgroups around the best share the one that is predicted faster; a given share is kept.
  const auto below = static_cast<int64_t>(is_given ? std::llround(wished) : std::floor(wished));
  plan.on_device = below;
  plan.predicted_seconds = predicted(request, lines, plan.subgroups, below);
  for (int64_t other = below - 1; !is_given && other <= below + 2; ++other) {
    if (other < 0 || other > plan.subgroups) continue;
    const double seconds = predicted(request, lines, plan.subgroups, other);
    if (seconds < plan.predicted_seconds) plan.predicted_seconds = seconds, plan.on_device = other;
  }
  const double share = static_cast<double>(plan.on_device) / static_cast<double>(plan.subgroups);
  plan.limit = kOffloadLimits[limit_at(lines, share)];
  plan.reason =
      concat(plan.on_device, " of ", plan.subgroups, " subgroups on the device: ", milliseconds(plan.predicted_seconds),
             " predicted, bound ", milliseconds(plan.bound_seconds), ", limited by ", plan.limit);
  return plan;
}

}  // namespace kernel_pytorch::plan
