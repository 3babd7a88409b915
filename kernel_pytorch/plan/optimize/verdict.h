// What timings decide in `optimize`: whether a part's replacement stays, is left to a trial together with others or
// goes, which of several ways stays, and whether the whole model is faster. One side is faster beyond doubt where its
// upper quartile is below the other's lower one, where its median is far below that (a slow turn among few is an upper
// quartile), or where turn by turn it was, as often as chance does not explain.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

struct Timing {
  double median_us = 0, low_us = 0, high_us = 0;  // low and high are quartiles
};

struct Comparison {  // the same run without a change and with it, timed in turns
  Timing before, after;
  double sure_gain = 0;  // that turns side by side leave no doubt of; 0: unknown
};

// Whether a change of the whole model pays.
KP_EXPORT bool pays(const Comparison& comparison);

// Whether the whole is faster beyond doubt, by however little: for changes that pay only together.
KP_EXPORT bool is_faster(const Comparison& comparison);

// Whether the whole is faster by enough of what its tuned problems save by themselves: the tuner's buffers are never in
// a cache and those of a model often are, so a kernel may be better for the one and worse for the other.
KP_EXPORT bool confirms_tuning(const Comparison& comparison, double expected_us);

// One way of replacing a part, by its clocks: the one that decides first (on a GPU the device's own time), then that of
// calls. A way that does not compute what the original does has none.
using WayClocks = std::vector<Comparison>;

struct PartVerdict {
  int64_t way = -1;          // to keep; -1 for none
  int64_t maybe = -1;        // where none is kept: may be faster by less than the part's clock can tell; -1 for none
  bool costs_calls = false;  // `way` takes less of the device's time and more of the host's: the whole decides
};

// `predicted_us` is what the plan says that the part saves. Earlier ways do less work: a later one has to be clearly
// faster.
KP_EXPORT PartVerdict judge_part(const std::vector<WayClocks>& ways, double predicted_us);

}  // namespace kernel_pytorch::plan
