// Which of several formats each layer's weight is kept in, so that the sum of the layers' errors is least while their
// bytes stay within a budget: a knapsack with one choice for each layer. Solved exactly, layer by layer: of the ways to
// choose for the layers so far only those are kept that no other beats in both bytes and error. Where more than
// kMostWays of them are left, bytes are counted in coarser units, rounded up, and the answer says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

struct FormatChoice {
  int64_t bytes = 0;
  double error = 0;  // in any unit in which layers' errors add up
};

struct PrecisionRequest {
  std::vector<std::vector<FormatChoice>> layers{};  // at least one choice each
  int64_t budget_bytes = 0;
  int64_t most_ways = int64_t{1} << 20;  // of the layers so far, kept at a time
};

struct PrecisionPlan {
  bool fits = false;               // else every layer has its smallest choice
  bool is_exact = true;            // no other choice within the budget has a smaller error
  std::vector<int64_t> choices{};  // of each layer
  int64_t bytes = 0;
  double error = 0;
  int64_t least_bytes = 0;  // with every layer's smallest choice
  std::string reason{};
};

KP_EXPORT PrecisionPlan plan_precision(const PrecisionRequest& request);

}  // namespace kernel_pytorch::plan
