// How attention of one sequence is shared by the members of a group: round a ring (in order, or zigzag, which balances
// causal work), with all keys gathered first, or with sequence exchanged for heads. Each schedule's time is predicted
// from sizes and rates: work of the busiest member, communication that no work hides, fp32 results merged.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

struct ContextParallelRequest {
  int64_t members = 1;
  int64_t batch = 1, sequence = 0;  // the whole sequence
  int64_t heads = 1, key_heads = 1, size = 0, value_size = 0;
  int64_t element_bytes = 2;
  bool causal = false;
  bool backward = false;                // of a training step: forward and backward
  int64_t window = -1;                  // keys that a query sees on each side that it sees; -1: all
  double flops_per_second = 6e14;       // of attention, one member
  double link_bytes_per_second = 2e11;  // that a member sends while it receives as many
  double memory_bytes_per_second = 3.5e12;
  double message_us = 15;  // of one exchange, however small
  double free_bytes = 0;   // memory of a member for keys that are not its own; 0: not known
};

struct ScheduleCost {
  std::string_view schedule{};
  double us = 0;          // the sum of the three
  double work_us = 0;     // of the member with most of it
  double exposed_us = 0;  // communication that no work hides
  double merge_us = 0;
  double sent_bytes = 0;    // by a member
  double memory_bytes = 0;  // beyond a member's own tensors
  std::string obstacle{};   // why it cannot be; empty: it can
};

struct ContextParallelPlan {
  std::string schedule{};
  std::string reason{};
  std::vector<ScheduleCost> schedules{};  // ring, zigzag, allgather, ulysses
};

KP_EXPORT ContextParallelPlan plan_context_parallel(const ContextParallelRequest& request);

}  // namespace kernel_pytorch::plan
