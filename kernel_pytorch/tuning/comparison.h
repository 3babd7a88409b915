// Whether timings changed, from two sets of interleaved samples. Three guards against crying wolf: the samples of a run
// become a few medians of neighbours, since neighbours share their moment's noise and are not many independent values;
// a change must be larger than a threshold as well as unlikely to be chance; and where a control (a copy) was timed in
// the same rounds, the times divided by the control's must have changed too, or it was the machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::tuning {

struct RunSamples {
  std::vector<double> samples_us;  // in the order of the rounds
  std::vector<double> control_us;  // of the same rounds, or empty
};
using Series = std::vector<RunSamples>;  // one a process

enum class Change { kNone, kFaster, kSlower, kMachine, kTooFew };
KP_EXPORT std::string_view name_of(Change change);

struct SeriesPair {
  std::string name;
  Series before, after;
};

struct SeriesChange {
  std::string name;
  Change change = Change::kNone;
  double before_us = 0, after_us = 0;  // medians
  double ratio = 1;                    // after over before
  double control_ratio = 0;            // the control's, 0 where there is none
  double p = 1;                        // two-sided, adjusted for the number of series
  bool is_exact = false;
};

struct CompareOptions {
  double threshold = 0.05;     // smaller changes are none
  double significance = 0.01;  // of all comparisons together
};

KP_EXPORT std::vector<SeriesChange> compare(const std::vector<SeriesPair>& pairs, const CompareOptions& options);

// Medians of `blocks` stretches of neighbours; the values themselves where there are not twice as many.
KP_EXPORT std::vector<double> block_medians(const std::vector<double>& values, size_t blocks);

}  // namespace kernel_pytorch::tuning
