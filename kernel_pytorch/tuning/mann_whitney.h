// The Mann-Whitney test: whether the values of one sample tend to be larger than another's. It asks nothing of their
// distribution, which timings need: theirs has a floor and a long tail. Exact for small samples, ties included; the
// normal approximation with corrections for ties and continuity otherwise.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::tuning {

struct RankTest {
  double u = 0;          // pairs in which `after` is larger, a tie counting half
  double p_greater = 1;  // of a u as large as this or larger, were both the same
  double p_less = 1;
  bool is_exact = false;

  double p_two_sided() const { return std::min(1.0, 2 * std::min(p_greater, p_less)); }
};

// Both samples need a value; none may be NaN.
KP_EXPORT RankTest rank_test(std::span<const double> before, std::span<const double> after);

// Holm's: p-values of several tests, raised so that each may be held against one limit for all of them together.
KP_EXPORT std::vector<double> holm_adjusted(std::span<const double> p_values);

}  // namespace kernel_pytorch::tuning
