// How much memory a step needs, and how large a batch may be. A front end runs the step without data and hands over
// every allocation and release in order; the peak of their sum is what the step needs, split by kind at that moment.
// Two such peaks give the line over the batch from which the largest that fits follows.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

enum class MemoryKind : uint8_t { kParameters, kGradients, kOptimizer, kInputs, kActivations };
inline constexpr std::array<std::string_view, 5> kMemoryKindNames = {"parameters", "gradients", "optimizer", "inputs",
                                                                     "activations"};

struct MemoryEvent {
  int64_t bytes = 0;  // below zero: given back
  MemoryKind kind = MemoryKind::kActivations;
};

struct MemoryPlan {
  int64_t peak_bytes = 0;
  std::array<int64_t, kMemoryKindNames.size()> bytes_at_peak{};  // by kind
  int64_t left_bytes = 0;                                        // after the last event
};

KP_EXPORT MemoryPlan plan_memory(const std::vector<MemoryEvent>& events);

struct BatchRequest {
  int64_t first_batch = 1, second_batch = 2;
  double first_bytes = 0, second_bytes = 0;  // peaks of the two
  double capacity_bytes = 0;
  double reserve = 0.1;       // share of the capacity that fragments and libraries may take
  double fixed_us = 0;        // of a step whatever its batch: launches, weights read
  double sample_us = 0;       // of each sample; 0: not known
  double least_share = 0.95;  // of the throughput of an endless batch, beyond which a larger one buys nothing
};

struct BatchPlan {
  int64_t batch = 0;  // 0: not even one sample fits
  int64_t fits = 0;   // the largest that does
  std::string reason{};
};

KP_EXPORT BatchPlan plan_batch(const BatchRequest& request);

}  // namespace kernel_pytorch::plan
