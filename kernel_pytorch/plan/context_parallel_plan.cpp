#include "kernel_pytorch/plan/context_parallel_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kBackwardWork = 2.5;  // of the forward's products

std::string short_text(double value) {
  std::ostringstream text;
  text << std::setprecision(3) << value;
  return text.str();
}

// What the schedules share, in doubles.
struct Sizes {
  double members, rows;  // rows: of one member
  double queries_bytes, keys_bytes, output_floats_bytes, key_gradient_bytes;
  double pair_flops;  // of one query and one key, all heads and batches

  explicit Sizes(const ContextParallelRequest& request) {
    members = static_cast<double>(request.members);
    rows = static_cast<double>(request.sequence) / members;
    const double columns = static_cast<double>(request.size + request.value_size);
    const double tokens = rows * static_cast<double>(request.batch);
    const double heads = static_cast<double>(request.heads), key_heads = static_cast<double>(request.key_heads);
    const double element = static_cast<double>(request.element_bytes);
    queries_bytes = tokens * heads * columns * element;  // and the output
    keys_bytes = tokens * key_heads * columns * element;
    key_gradient_bytes = tokens * key_heads * columns * 4;
    output_floats_bytes = tokens * heads * static_cast<double>(request.value_size) * 4;
    pair_flops = 2 * static_cast<double>(request.batch) * heads * columns;
  }
};

// Pairs of a query and a key that the busiest member of a contiguous split has, and those of a balanced one.
double busiest_pairs(const ContextParallelRequest& request, const Sizes& sizes) {
  const double all = sizes.rows * sizes.members;
  double seen = request.causal ? all - sizes.rows / 2 : all;  // by the last member's queries, on average
  if (request.window >= 0) {
    const double reach = static_cast<double>(request.window) * (request.causal ? 1 : 2) + 1;
    seen = std::min(seen, reach);
  }
  return sizes.rows * seen;
}
double balanced_pairs(const ContextParallelRequest& request, const Sizes& sizes) {
  const double busiest = busiest_pairs(request, sizes), all = sizes.rows * sizes.members;
  return request.causal ? std::min(busiest, sizes.rows * all / 2) : busiest;
}

class Planner {
 public:
  explicit Planner(const ContextParallelRequest& request) : request_(request), sizes_(request) {}

  ScheduleCost ring(std::string_view name, double pairs, int64_t runs) const {
    ScheduleCost cost = begin(name, pairs, runs);
    const double hops = sizes_.members - 1;
    // A hop of keys overlaps a step's work; backward sends their gradients too, and once more to return them to their
    // owner.
    const double step_us = cost.work_us / sizes_.members;
    const double forward_share = request_.backward ? 1 / (1 + kBackwardWork) : 1;
    cost.exposed_us = hops * exposed(sizes_.keys_bytes, step_us * forward_share);
    cost.sent_bytes = hops * sizes_.keys_bytes;
    if (request_.backward) {
      const double bytes = sizes_.keys_bytes + sizes_.key_gradient_bytes;
      cost.exposed_us += hops * exposed(bytes, step_us * (1 - forward_share)) + transfer_us(sizes_.key_gradient_bytes);
      cost.sent_bytes += hops * bytes + sizes_.key_gradient_bytes;
    }
    cost.merge_us = merged_us(sizes_.members);
    cost.memory_bytes = 2 * sizes_.keys_bytes + sizes_.output_floats_bytes;
    if (request_.backward) cost.memory_bytes += 3 * sizes_.key_gradient_bytes;
    return finish(cost);
  }

  ScheduleCost allgather() const {
    ScheduleCost cost = begin("allgather", busiest_pairs(request_, sizes_), request_.members);
    const double others = sizes_.members - 1;
    cost.sent_bytes = others * sizes_.keys_bytes;
    cost.memory_bytes = sizes_.members * sizes_.keys_bytes + sizes_.output_floats_bytes;
    if (request_.backward) {
      cost.sent_bytes += others * (sizes_.keys_bytes + sizes_.key_gradient_bytes);
      cost.memory_bytes += 2 * sizes_.members * sizes_.key_gradient_bytes;
    }
    cost.exposed_us = transfer_us(cost.sent_bytes);
    cost.merge_us = merged_us(1);
    return finish(cost);
  }

  ScheduleCost ulysses() const {
    ScheduleCost cost = begin("ulysses", balanced_pairs(request_, sizes_), request_.members);
    // Few heads of keys are repeated, one for each member.
    const double repeats =
        std::max(1.0, sizes_.members / static_cast<double>(std::max<int64_t>(request_.key_heads, 1)));
    const double share = (sizes_.members - 1) / sizes_.members;
    cost.sent_bytes = share * (sizes_.queries_bytes + repeats * sizes_.keys_bytes) * (request_.backward ? 3 : 1);
    cost.exposed_us = transfer_us(cost.sent_bytes) + 3 * request_.message_us;
    cost.memory_bytes = 2 * (sizes_.queries_bytes + repeats * sizes_.keys_bytes);
    const bool is_shared = request_.heads % request_.members == 0 &&
                           (request_.key_heads % request_.members == 0 || request_.members % request_.key_heads == 0);
    if (!is_shared) {
      cost.obstacle = concat(request_.heads, " heads and ", request_.key_heads, " of keys cannot be shared by ",
                             request_.members, " members");
    }
    return finish(cost);
  }

 private:
  ScheduleCost begin(std::string_view name, double pairs, int64_t runs) const {
    ScheduleCost cost{.schedule = name};
    const double products = pairs * sizes_.pair_flops * (request_.backward ? 1 + kBackwardWork : 1);
    cost.work_us = products / request_.flops_per_second * 1e6;
    if (request_.sequence % runs != 0) {
      cost.obstacle = concat("a sequence of ", request_.sequence, " has no ", runs, " equal runs");
    }
    return cost;
  }
  ScheduleCost finish(ScheduleCost cost) const {
    cost.us = cost.work_us + cost.exposed_us + cost.merge_us;
    if (cost.obstacle.empty() && request_.free_bytes > 0 && cost.memory_bytes > request_.free_bytes) {
      cost.obstacle = concat("it needs ", short_text(cost.memory_bytes / 1e9), " GB more on each member, ",
                             short_text(request_.free_bytes / 1e9), " are free");
    }
    return cost;
  }
  double transfer_us(double bytes) const { return bytes / request_.link_bytes_per_second * 1e6 + request_.message_us; }
  double exposed(double bytes, double work_us) const { return std::max(0.0, transfer_us(bytes) - work_us); }
  // fp32 results read and written by every part but the first, then written in the query's type.
  double merged_us(double parts) const {
    const double passes = 2 * (parts - 1) + (parts > 1 ? 2 : 0);
    return passes * sizes_.output_floats_bytes / request_.memory_bytes_per_second * 1e6;
  }

  const ContextParallelRequest& request_;
  Sizes sizes_;
};

std::string reason_of(const ScheduleCost& best, const ContextParallelPlan& plan,
                      const ContextParallelRequest& request) {
  std::string text = concat(best.schedule, ": ", short_text(best.work_us), " us of work on the busiest of ",
                            request.members, " members, ", short_text(best.exposed_us),
                            " us of communication that no work hides, ", short_text(best.merge_us), " us of merging");
  for (const ScheduleCost& other : plan.schedules) {
    if (other.schedule == best.schedule) continue;
    text += concat("; ", other.schedule, ": ");
    text += other.obstacle.empty() ? concat(short_text(other.us / best.us), "x as long") : other.obstacle;
  }
  return text;
}

}  // namespace

ContextParallelPlan plan_context_parallel(const ContextParallelRequest& request) {
  for (int64_t count : {request.members, request.batch, request.heads, request.key_heads, request.element_bytes}) {
    KP_CHECK(count >= 1, "context parallel plan: a count is ", count,
             "; members, batch, heads and bytes are 1 or more");
  }
  KP_CHECK(request.sequence >= 0 && request.size >= 0 && request.value_size >= 0,
           "context parallel plan: the sequence is ", request.sequence, ", sizes are ", request.size, " and ",
           request.value_size, "; they cannot be negative");
  for (double rate : {request.flops_per_second, request.link_bytes_per_second, request.memory_bytes_per_second}) {
    KP_CHECK(rate > 0 && std::isfinite(rate), "context parallel plan: a rate is ", rate, "; rates are above 0");
  }
  if (request.members == 1) return {.schedule = "ring", .reason = "one member: its kernel streams over the keys"};
  const Planner planner(request);
  const Sizes sizes(request);
  ContextParallelPlan plan;
  plan.schedules = {planner.ring("ring", busiest_pairs(request, sizes), request.members),
                    planner.ring("zigzag", balanced_pairs(request, sizes), 2 * request.members), planner.allgather(),
                    planner.ulysses()};
  const ScheduleCost* best = nullptr;
  for (const ScheduleCost& cost : plan.schedules) {
    if (cost.obstacle.empty() && (best == nullptr || cost.us < best->us)) best = &cost;
  }
  if (best == nullptr) {
    std::string obstacles;
    for (const ScheduleCost& cost : plan.schedules) obstacles += concat("; ", cost.schedule, ": ", cost.obstacle);
    fail(ErrorCode::kInvalidArgument, concat("context parallel plan: no schedule is possible", obstacles));
  }
  plan.schedule = best->schedule;
  plan.reason = reason_of(*best, plan, request);
  return plan;
}

}  // namespace kernel_pytorch::plan
