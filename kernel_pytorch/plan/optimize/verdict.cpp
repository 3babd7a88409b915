#include "kernel_pytorch/plan/optimize/verdict.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kLeastGain = 1.01;        // of a part, and of the whole with everything
constexpr double kClearLoss = 0.97;        // a part no slower than this may pay by another clock, or with others
constexpr double kTie = 1.01;              // of two ways this close the earlier stays
constexpr double kFaintGain = 1.002;       // of the whole with parts that only the whole can tell
constexpr double kLeastSavingUs = 20;      // predicted, below which a gain that no clock can tell is not worth a change
constexpr double kBeyondRanges = 1.5;      // faster by its median than this: one slow turn among few says nothing
constexpr double kConfirmedByWhole = 0.5;  // share of what tuned problems save that the whole has to save

void check(const Comparison& comparison) {
  for (const Timing* timing : {&comparison.before, &comparison.after}) {
    for (double us : {timing->median_us, timing->low_us, timing->high_us}) {
      KP_CHECK(us > 0 && std::isfinite(us), "verdict: a timing is ", us, " us; it must be positive");
    }
  }
}

double gain(const Comparison& comparison) {
  return comparison.before.low_us / comparison.after.low_us;
}

bool is_apart(const Comparison& comparison) {
  const Timing& after = comparison.after;
  return std::min(after.high_us, kBeyondRanges * after.median_us) < comparison.before.low_us;
}

// A noisy machine blurs the quartiles, and turns side by side share its noise.
bool is_gain(const Comparison& comparison, double least) {
  const double gained = gain(comparison);
  return (gained >= least && is_apart(comparison)) || (gained > 1 && comparison.sure_gain >= least);
}

// Whether a change too small for the clock is worth a trial with others: no slower as far as the clock can tell, and
// less work by the plan.
bool may_save(const Comparison& comparison, double predicted_us) {
  const bool overlaps =
      comparison.before.low_us <= comparison.after.high_us && comparison.after.low_us <= comparison.before.high_us;
  return predicted_us > kLeastSavingUs && overlaps && gain(comparison) > kClearLoss;
}

bool may_gain(const Comparison& comparison, double predicted_us) {
  const double by_median = comparison.before.median_us / comparison.after.median_us;
  return std::min(by_median, gain(comparison)) > 1 || may_save(comparison, predicted_us);
}

}  // namespace

bool pays(const Comparison& comparison) {
  check(comparison);
  return is_gain(comparison, kLeastGain);
}

bool is_faster(const Comparison& comparison) {
  check(comparison);
  return is_gain(comparison, kFaintGain);
}

bool confirms_tuning(const Comparison& comparison, double expected_us) {
  const double saved_us = comparison.before.median_us - comparison.after.median_us;
  return is_faster(comparison) && saved_us >= kConfirmedByWhole * expected_us;
}

PartVerdict judge_part(const std::vector<WayClocks>& ways, double predicted_us) {
  PartVerdict verdict;
  double best = 0, best_maybe = 0;
  for (size_t i = 0; i < ways.size(); ++i) {
    if (ways[i].empty()) continue;
    const Comparison &decides = ways[i].front(), &calls = ways[i].back();
    const double gained = gain(decides);
    if (pays(decides) || (pays(calls) && gained > kClearLoss)) {
      if (verdict.way >= 0 && gained <= kTie * best) continue;
      best = gained;
      verdict.way = static_cast<int64_t>(i);
      verdict.costs_calls = ways[i].size() > 1 && gain(calls) < kClearLoss;
    } else if (may_gain(decides, predicted_us) && gained > best_maybe) {
      best_maybe = gained;
      verdict.maybe = static_cast<int64_t>(i);
    }
  }
  if (verdict.way >= 0) verdict.maybe = -1;
  return verdict;
}

}  // namespace kernel_pytorch::plan
