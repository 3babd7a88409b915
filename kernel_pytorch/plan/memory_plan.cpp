#include "kernel_pytorch/plan/memory_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr int64_t kLargestBatch = int64_t{1} << 20;

// Powers of two to 64, then multiples of 64: what tiles are filled by.
int64_t even_batch(int64_t batch) {
  return batch >= 64 ? batch / 64 * 64 : static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(batch)));
}

std::string gigabytes(double bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << bytes / 1e9 << " GB";
  return text.str();
}

}  // namespace

MemoryPlan plan_memory(const std::vector<MemoryEvent>& events) {
  MemoryPlan plan;
  std::array<int64_t, kMemoryKindNames.size()> now{};
  int64_t total = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto kind = static_cast<size_t>(events[i].kind);
    KP_CHECK(kind < now.size(), "memory plan: event ", i, " is of kind ", kind, "; there are ", now.size());
    KP_CHECK(!__builtin_add_overflow(total, events[i].bytes, &total), "memory plan: event ", i, " of ", events[i].bytes,
             " bytes exceeds 2^63 in all");
    now[kind] += events[i].bytes;
    KP_CHECK(now[kind] >= 0, "memory plan: event ", i, " gives back ", -events[i].bytes, " bytes of ",
             kMemoryKindNames[kind], ", ", -now[kind], " more than were taken");
    if (total > plan.peak_bytes) plan.peak_bytes = total, plan.bytes_at_peak = now;
  }
  plan.left_bytes = total;
  return plan;
}

BatchPlan plan_batch(const BatchRequest& request) {
  KP_CHECK(request.first_batch >= 1 && request.second_batch > request.first_batch, "batch plan: the batches are ",
           request.first_batch, " and ", request.second_batch, "; the second must be larger");
  for (double part :
       {request.first_bytes, request.second_bytes, request.capacity_bytes, request.fixed_us, request.sample_us}) {
    KP_CHECK(part >= 0 && std::isfinite(part), "batch plan: a quantity is ", part, "; all are 0 or more");
  }
  KP_CHECK(request.reserve >= 0 && request.reserve < 1 && request.least_share >= 0 && request.least_share < 1,
           "batch plan: reserve ", request.reserve, " and least_share ", request.least_share, " are shares below 1");
  const double sample_bytes =
      (request.second_bytes - request.first_bytes) / static_cast<double>(request.second_batch - request.first_batch);
  const double fixed_bytes = request.first_bytes - sample_bytes * static_cast<double>(request.first_batch);
  const double usable = request.capacity_bytes * (1 - request.reserve);
  BatchPlan plan;
  if (fixed_bytes + std::max(sample_bytes, 0.0) > usable) {
    plan.reason = concat("one sample needs ", gigabytes(fixed_bytes + sample_bytes), "; ", gigabytes(usable), " of ",
                         gigabytes(request.capacity_bytes), " may be used");
    return plan;
  }
  const double most = sample_bytes > 0 ? (usable - fixed_bytes) / sample_bytes : static_cast<double>(kLargestBatch);
  plan.fits = static_cast<int64_t>(std::min(most, static_cast<double>(kLargestBatch)));
  plan.batch = even_batch(plan.fits);
  plan.reason = concat(plan.fits, " samples fit into ", gigabytes(usable), " (", gigabytes(fixed_bytes), " and ",
                       gigabytes(sample_bytes), " a sample)");
  if (request.sample_us > 0) {  // b samples reach b s / (f + b s) of the greatest throughput
    const double enough =
        std::ceil(request.least_share / (1 - request.least_share) * request.fixed_us / request.sample_us);
    const auto rounded =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::clamp(enough, 1.0, double{kLargestBatch}))));
    if (rounded < plan.batch) {
      plan.batch = rounded;
      plan.reason = concat(plan.batch, " samples reach ", std::lround(100 * request.least_share),
                           " % of the throughput of an endless batch and need ",
                           gigabytes(fixed_bytes + sample_bytes * static_cast<double>(plan.batch)));
    }
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
