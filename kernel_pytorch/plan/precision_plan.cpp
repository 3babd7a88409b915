#include "kernel_pytorch/plan/precision_plan.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

// So that sums of bytes are numbers of 64 bits.
constexpr size_t kMostLayers = size_t{1} << 14;
constexpr int64_t kMostBytes = int64_t{1} << 48;

// A way to choose for the layers so far: its totals, and how it came about.
struct Way {
  int64_t bytes;
  double error;
  int32_t before, choice;
};

void check(const PrecisionRequest& request) {
  KP_CHECK(request.budget_bytes >= 0, "precision_plan: budget_bytes is ", request.budget_bytes,
           "; it must be 0 or more");
  KP_CHECK(request.most_ways >= 2, "precision_plan: most_ways is ", request.most_ways, "; it must be 2 or more");
  KP_CHECK(request.layers.size() <= kMostLayers, "precision_plan: there are ", request.layers.size(),
           " layers; at most ", kMostLayers);
  for (size_t i = 0; i < request.layers.size(); ++i) {
    KP_CHECK(!request.layers[i].empty(), "precision_plan: layer ", i, " has no choice; give it one at least");
    for (const FormatChoice& choice : request.layers[i]) {
      KP_CHECK(choice.bytes >= 0 && choice.bytes <= kMostBytes && std::isfinite(choice.error) && choice.error >= 0,
               "precision_plan: layer ", i, " has a choice of ", choice.bytes, " bytes and error ", choice.error,
               "; bytes are from 0 to 2^48, an error is a number that is not negative");
    }
  }
}

// Those that no other beats, by ascending bytes and so by descending error.
void keep_unbeaten(std::vector<Way>& ways) {
  std::ranges::sort(ways, [](const Way& a, const Way& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.error != b.error ? a.error < b.error : a.choice < b.choice;
  });
  size_t kept = 0;
  for (const Way& way : ways) {
    if (kept == 0 || way.error < ways[kept - 1].error) ways[kept++] = way;
  }
  ways.resize(kept);
}

// The least that the layers after each one take.
std::vector<int64_t> least_after(const PrecisionRequest& request) {
  std::vector<int64_t> least(request.layers.size() + 1, 0);
  for (size_t i = request.layers.size(); i-- > 0;) {
    least[i] = least[i + 1] + std::ranges::min(request.layers[i], {}, &FormatChoice::bytes).bytes;
  }
  return least;
}

}  // namespace

PrecisionPlan plan_precision(const PrecisionRequest& request) {
  check(request);
  const std::vector<int64_t> least = least_after(request);
  const size_t layers = request.layers.size();
  PrecisionPlan plan{.least_bytes = least[0]};
  plan.fits = least[0] <= request.budget_bytes;
  const int64_t budget = plan.fits ? request.budget_bytes : least[0];
  std::vector<std::vector<Way>> steps(layers + 1);
  steps[0] = {{0, 0, -1, -1}};
  for (size_t i = 0; i < layers; ++i) {
    std::vector<Way>& next = steps[i + 1];
    for (size_t before = 0; before < steps[i].size(); ++before) {
      const Way& way = steps[i][before];
      for (size_t c = 0; c < request.layers[i].size(); ++c) {
        const FormatChoice& choice = request.layers[i][c];
        const int64_t bytes = way.bytes + choice.bytes;
        if (bytes + least[i + 1] > budget) continue;
        next.push_back({bytes, way.error + choice.error, static_cast<int32_t>(before), static_cast<int32_t>(c)});
      }
    }
    keep_unbeaten(next);
    if (static_cast<int64_t>(next.size()) > request.most_ways) {
      // Of the ways in a unit the one with the least error; the smallest way stays, so that something fits.
      plan.is_exact = false;
      const int64_t units = request.most_ways - 1, span = next.back().bytes - next.front().bytes + 1;
      std::vector<Way> coarse = {next.front()};
      for (size_t j = 1; j < next.size(); ++j) {
        const auto unit_of = [&](const Way& way) {
          return (way.bytes - next.front().bytes) / ((span + units - 1) / units);
        };
        const bool is_last = j + 1 == next.size() || unit_of(next[j + 1]) != unit_of(next[j]);
        if (is_last) coarse.push_back(next[j]);
      }
      next = std::move(coarse);
    }
  }
  const Way* way = &steps[layers].back();  // the most bytes, the least error
  plan.bytes = way->bytes;
  plan.error = way->error;
  plan.choices.resize(layers);
  for (size_t i = layers; i > 0; --i) {
    plan.choices[i - 1] = way->choice;
    way = &steps[i - 1][static_cast<size_t>(way->before)];
  }
  plan.reason = plan.fits ? concat(plan.bytes, " of ", request.budget_bytes, " bytes")
                          : concat("the smallest choices take ", least[0], " bytes, the budget is ",
                                   request.budget_bytes, "; give more bytes or smaller formats");
  return plan;
}

}  // namespace kernel_pytorch::plan
