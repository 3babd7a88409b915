// Which lengths to pad to: at most k buckets for the lengths that were seen, each length running at the next bucket
// above it. The optimal plan minimises the summed cost by a dynamic program; since a longer run never costs less, its
// inner minimum is the lower envelope of lines met in order, so n distinct lengths and k buckets take n*k steps.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::plan {

enum class BucketStrategy : uint8_t {
  kOptimal,        // least cost by the model given
  kMemoryOptimal,  // least padded elements, whatever the cost model says
  kHardwareAware,  // least cost, at lengths that fill the device's tiles
  kAdaptive,       // optimal, but `current` stays unless the gain is worth a change
  kGeometric,      // equal ratios from the shortest to the longest
  kLinear,         // equal steps
};

struct LengthCount {
  int64_t length = 0;
  double count = 0;  // weights of any kind: adaptive callers let old lengths fade
};

// The cost of one item at length L: max(floor, linear L + quadratic L^2). The dynamic program relies on it never
// decreasing.
struct LengthCost {
  double floor = 0, linear = 1, quadratic = 0;
  double bucket = 0;  // of having one more bucket: a graph's capture and memory
};

struct BucketRequest {
  std::vector<LengthCount> lengths{};  // in any order, repeats are fine
  BucketStrategy strategy = BucketStrategy::kOptimal;
  int64_t max_buckets = 32;
  int64_t alignment = 1;  // buckets are multiples of it
  int64_t longest = 0;    // that must fit, seen or not; 0: the longest seen
  LengthCost cost{};
  std::vector<int64_t> current{};  // buckets in use, ascending; empty: none
  double least_gain = 0.05;        // share of the current cost below which adaptive keeps them
};

struct BucketPlan {
  std::vector<int64_t> buckets{};  // ascending
  double cost = 0, unpadded_cost = 0;
  double padding_overhead = 0;  // padded elements over real ones, less 1
  double current_cost = 0;      // of `current`; 0 where there is none or it is too short
  bool changes = true;          // whether `buckets` differs from `current`
  std::string reason{};
};

KP_EXPORT BucketStrategy bucket_strategy_of(std::string_view word);
KP_EXPORT BucketPlan plan_buckets(const BucketRequest& request, const DeviceInfo& device);

}  // namespace kernel_pytorch::plan
