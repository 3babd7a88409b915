#include "kernel_pytorch/tuning/comparison.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/mann_whitney.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr size_t kBlocksPerRun = 20;

double median_of(std::vector<double> values) {
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(middle), values.end());
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle] + *std::max_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(middle))) / 2;
}

void check(const SeriesPair& pair) {
  for (const Series* series : {&pair.before, &pair.after}) {
    KP_CHECK(!series->empty(), "compare: ", pair.name, " has no run");
    for (const RunSamples& run : *series) {
      KP_CHECK(!run.samples_us.empty(), "compare: ", pair.name, " has a run without samples");
      KP_CHECK(run.control_us.empty() || run.control_us.size() == run.samples_us.size(), "compare: ", pair.name,
               " has ", run.samples_us.size(), " samples and ", run.control_us.size(),
               " of its control; they belong to the same rounds");
      for (const std::vector<double>* values : {&run.samples_us, &run.control_us}) {
        for (const double value : *values)
          KP_CHECK(std::isfinite(value) && value > 0, "compare: ", pair.name, " has the time ", value);
      }
    }
  }
}

bool has_control(const Series& series) {
  return std::all_of(series.begin(), series.end(), [](const RunSamples& run) { return !run.control_us.empty(); });
}

enum class View { kTimes, kControl, kTimesOverControl };

std::vector<double> view_of(const RunSamples& run, View view) {
  if (view == View::kTimes) return run.samples_us;
  if (view == View::kControl) return run.control_us;
  std::vector<double> ratios;
  for (size_t i = 0; i < run.samples_us.size(); ++i) ratios.push_back(run.samples_us[i] / run.control_us[i]);
  return ratios;
}

std::vector<double> values_of(const Series& series, View view) {
  std::vector<double> values;
  for (const RunSamples& run : series) {
    for (const double value : block_medians(view_of(run, view), kBlocksPerRun)) values.push_back(value);
  }
  return values;
}

struct Tested {
  double before = 0, after = 0;
  RankTest test;
  double least_p = 0;  // what the test could say of these many values at most
  double ratio() const { return after / before; }
};

Tested test(const SeriesPair& pair, View view) {
  const std::vector<double> before = values_of(pair.before, view), after = values_of(pair.after, view);
  Tested tested{median_of(before), median_of(after), rank_test(before, after), 2};
  for (size_t i = 1; i <= after.size(); ++i)
    tested.least_p *= static_cast<double>(i) / static_cast<double>(before.size() + i);
  return tested;
}

bool is_beyond(double ratio, double threshold) {
  return ratio > 1 + threshold || ratio < 1 / (1 + threshold);
}

// Before the number of series is known: what the times say, and what remains of it after division by the control.
struct Row {
  SeriesChange result;
  Tested times;
  Tested judged;  // the times over the control's where there is one
  double p = 1;   // both must have changed, so the larger of both
};

Row test_row(const SeriesPair& pair) {
  check(pair);
  Row row;
  row.times = row.judged = test(pair, View::kTimes);
  row.result.name = pair.name;
  if (has_control(pair.before) && has_control(pair.after)) {
    row.judged = test(pair, View::kTimesOverControl);
    row.result.control_ratio = test(pair, View::kControl).ratio();
  }
  row.result.before_us = row.times.before;
  row.result.after_us = row.times.after;
  row.result.ratio = row.times.ratio();
  row.result.is_exact = row.times.test.is_exact;
  row.p = std::max(row.times.test.p_two_sided(), row.judged.test.p_two_sided());
  return row;
}

Change change_of(const Row& row, double p, const CompareOptions& options) {
  if (row.times.least_p > options.significance) return Change::kTooFew;
  const bool times_changed = is_beyond(row.times.ratio(), options.threshold);
  const bool agree = (row.times.ratio() > 1) == (row.judged.ratio() > 1);
  if (times_changed && agree && is_beyond(row.judged.ratio(), options.threshold) && p < options.significance) {
    return row.times.ratio() > 1 ? Change::kSlower : Change::kFaster;
  }
  const bool times_alone = times_changed && row.times.test.p_two_sided() < options.significance;
  return times_alone && row.result.control_ratio > 0 ? Change::kMachine : Change::kNone;
}

}  // namespace

std::string_view name_of(Change change) {
  switch (change) {
    case Change::kNone:
      return "none";
    case Change::kFaster:
      return "faster";
    case Change::kSlower:
      return "slower";
    case Change::kMachine:
      return "machine";
    case Change::kTooFew:
      return "too few samples";
  }
  return "";
}

std::vector<double> block_medians(const std::vector<double>& values, size_t blocks) {
  if (values.size() < 2 * blocks) return values;
  std::vector<double> medians;
  for (size_t block = 0; block < blocks; ++block) {
    const auto begin = values.begin() + static_cast<ptrdiff_t>(block * values.size() / blocks);
    const auto end = values.begin() + static_cast<ptrdiff_t>((block + 1) * values.size() / blocks);
    medians.push_back(median_of({begin, end}));
  }
  return medians;
}

std::vector<SeriesChange> compare(const std::vector<SeriesPair>& pairs, const CompareOptions& options) {
  std::vector<Row> rows;
  std::vector<double> p_values;
  for (const SeriesPair& pair : pairs) {
    rows.push_back(test_row(pair));
    p_values.push_back(rows.back().p);
  }
  const std::vector<double> adjusted = holm_adjusted(p_values);
  std::vector<SeriesChange> changes;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].result.p = adjusted[i];
    rows[i].result.change = change_of(rows[i], adjusted[i], options);
    changes.push_back(std::move(rows[i].result));
  }
  return changes;
}

}  // namespace kernel_pytorch::tuning
