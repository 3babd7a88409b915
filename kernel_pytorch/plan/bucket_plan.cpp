#include "kernel_pytorch/plan/bucket_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr int64_t kMostBuckets = 1024, kMostLength = int64_t{1} << 40, kMostCells = int64_t{1} << 28;

double run_cost(const LengthCost& cost, int64_t length) {
  const auto l = static_cast<double>(length);
  return std::max(cost.floor, cost.linear * l + cost.quadratic * l * l);
}

int64_t rounded_up(int64_t length, int64_t multiple) {
  return (length + multiple - 1) / multiple * multiple;
}

// What a kernel computes anyway. A GPU's matrix instructions take 16 rows and its tiles grow to 128; the share that
// rounding adds stays below an eighth. A CPU's tiles have about as many rows as a register has lanes.
int64_t filled_tile(int64_t length, const DeviceInfo& device) {
  if (!device.is_cuda()) return rounded_up(length, length <= 64 ? 8 : 16);
  int64_t tile = 16;
  while (tile < 128 && length > tile * 8) tile *= 2;
  return rounded_up(length, tile);
}

struct Histogram {
  std::vector<int64_t> lengths;  // ascending, distinct
  std::vector<double> counts;
};

template <class Round>
Histogram histogram_of(const BucketRequest& request, const Round& round) {
  std::vector<LengthCount> sorted = request.lengths;
  if (request.longest > 0) sorted.push_back({request.longest, 0});
  for (LengthCount& item : sorted) item.length = round(item.length);
  std::ranges::sort(sorted, {}, &LengthCount::length);
  Histogram histogram;
  for (const LengthCount& item : sorted) {
    if (histogram.lengths.empty() || histogram.lengths.back() != item.length) {
      histogram.lengths.push_back(item.length);
      histogram.counts.push_back(0);
    }
    histogram.counts.back() += item.count;
  }
  return histogram;
}

// The cheapest way for lengths 1..j with b buckets ends with a bucket over i+1..j:
//   best[b][j] = c_j W_j + min over i < j of (best[b-1][i] - c_j W_i),    W_j: counts up to j, c_j: cost at length j.
// For fixed b each i is a line in c_j with slope -W_i. Slopes fall with i and c_j grows with j, so the lines that can
// still win form a queue: new ones push out those they cover at the back, queries walk off the front.
class LowerEnvelope {
 public:
  void clear() { first_ = 0, lines_.clear(); }

  void add(double slope, double intercept, int32_t index) {
    const Line line{slope, intercept, index};
    if (lines_.size() > first_ && lines_.back().slope == slope) {  // a length without weight
      if (lines_.back().intercept <= intercept) return;
      lines_.pop_back();
    }
    while (lines_.size() >= first_ + 2 && covers(lines_[lines_.size() - 2], lines_.back(), line)) lines_.pop_back();
    lines_.push_back(line);
  }

  int32_t best_at(double x) {
    while (first_ + 1 < lines_.size() && lines_[first_ + 1].at(x) <= lines_[first_].at(x)) ++first_;
    return lines_[first_].index;
  }

 private:
  struct Line {
    double slope, intercept;
    int32_t index;
    double at(double x) const { return slope * x + intercept; }
  };
  // Whether `middle` is nowhere below both neighbours: they cross before it meets `left`.
  static bool covers(const Line& left, const Line& middle, const Line& right) {
    return static_cast<long double>(right.intercept - left.intercept) * (left.slope - middle.slope) <=
           static_cast<long double>(middle.intercept - left.intercept) * (left.slope - right.slope);
  }

  std::vector<Line> lines_;
  size_t first_ = 0;
};

std::vector<int64_t> cheapest_buckets(const Histogram& histogram, const LengthCost& cost, int64_t max_buckets) {
  const auto n = static_cast<int32_t>(histogram.lengths.size());
  const auto most = static_cast<int32_t>(std::min<int64_t>(max_buckets, n));
  KP_CHECK(int64_t{n} * most <= kMostCells, "bucket plan: ", n, " distinct lengths times ", most,
           " buckets is more than ", kMostCells, "; raise the alignment or ask for fewer buckets");
  std::vector<double> weight(n + 1, 0), run(n + 1, 0);
  for (int32_t j = 1; j <= n; ++j) {
    weight[j] = weight[j - 1] + histogram.counts[j - 1];
    run[j] = run_cost(cost, histogram.lengths[j - 1]);
  }
  std::vector<double> before(n + 1, std::numeric_limits<double>::infinity()), best(n + 1);
  before[0] = 0;
  std::vector<int32_t> last(static_cast<size_t>(n) * most);  // [bucket][j-1]: where the last bucket begins
  double least = std::numeric_limits<double>::infinity();
  int32_t used = 0;
  LowerEnvelope envelope;
  for (int32_t b = 1; b <= most; ++b) {
    envelope.clear();
    std::ranges::fill(best, std::numeric_limits<double>::infinity());
    for (int32_t j = b; j <= n; ++j) {  // j lengths need at least as many as buckets
      if (std::isfinite(before[j - 1])) envelope.add(-weight[j - 1], before[j - 1], j - 1);
      const int32_t i = envelope.best_at(run[j]);
      best[j] = before[i] + run[j] * (weight[j] - weight[i]);
      last[static_cast<size_t>(b - 1) * n + j - 1] = i;
    }
    const double total = best[n] + cost.bucket * b;
    if (total < least - 1e-12 * std::abs(least) || used == 0) least = total, used = b;
    std::swap(before, best);
  }
  std::vector<int64_t> buckets(used);
  for (int32_t b = used, j = n; b > 0; --b) {
    buckets[b - 1] = histogram.lengths[j - 1];
    j = last[static_cast<size_t>(b - 1) * n + j - 1];
  }
  return buckets;
}

template <class Round>
std::vector<int64_t> grid_buckets(const BucketRequest& request, const Histogram& histogram, const Round& round) {
  const auto first = static_cast<double>(histogram.lengths.front()),
             end = static_cast<double>(histogram.lengths.back());
  std::vector<int64_t> buckets;
  for (int64_t step = 1; step <= request.max_buckets; ++step) {
    const double share = static_cast<double>(step) / static_cast<double>(request.max_buckets);
    const double at = request.strategy == BucketStrategy::kGeometric ? first * std::pow(end / first, share)
                                                                     : first + (end - first) * share;
    const int64_t bucket =
        step == request.max_buckets ? histogram.lengths.back() : round(static_cast<int64_t>(std::ceil(at - 1e-9 * at)));
    if (buckets.empty() || bucket > buckets.back()) buckets.push_back(bucket);
  }
  return buckets;
}

struct PaddedSums {
  bool fits = true;
  double cost = 0, elements = 0;
};

PaddedSums padded_sums(const Histogram& seen, const std::vector<int64_t>& buckets, const LengthCost& cost) {
  PaddedSums sums{.cost = cost.bucket * static_cast<double>(buckets.size())};
  size_t bucket = 0;
  for (size_t i = 0; i < seen.lengths.size(); ++i) {
    while (bucket < buckets.size() && buckets[bucket] < seen.lengths[i]) ++bucket;
    if (bucket == buckets.size()) return {.fits = false};
    sums.cost += seen.counts[i] * run_cost(cost, buckets[bucket]);
    sums.elements += seen.counts[i] * static_cast<double>(buckets[bucket]);
  }
  return sums;
}

void check_bucket_request(const BucketRequest& request) {
  KP_CHECK(!request.lengths.empty(), "bucket plan: no lengths were given; show it what was seen");
  KP_CHECK(request.max_buckets >= 1 && request.max_buckets <= kMostBuckets, "bucket plan: max_buckets is ",
           request.max_buckets, "; it must be from 1 to ", kMostBuckets);
  KP_CHECK(request.alignment >= 1 && request.alignment <= kMostLength, "bucket plan: alignment is ", request.alignment,
           "; it must be at least 1");
  KP_CHECK(request.longest >= 0 && request.longest <= kMostLength, "bucket plan: longest is ", request.longest,
           "; it must be from 0 to ", kMostLength);
  for (const LengthCount& item : request.lengths) {
    KP_CHECK(item.length >= 1 && item.length <= kMostLength, "bucket plan: a length is ", item.length,
             "; it must be from 1 to ", kMostLength);
    KP_CHECK(item.count >= 0 && std::isfinite(item.count), "bucket plan: length ", item.length, " was seen ",
             item.count, " times; a count is 0 or more");
  }
  const LengthCost& cost = request.cost;
  for (double part : {cost.floor, cost.linear, cost.quadratic, cost.bucket, request.least_gain}) {
    KP_CHECK(part >= 0 && std::isfinite(part), "bucket plan: a cost is ", part,
             "; a longer run must not be cheaper, so costs are 0 or more");
  }
  KP_CHECK(std::ranges::is_sorted(request.current, std::less_equal<>()),
           "bucket plan: the buckets in use must be ascending and distinct");
}

std::string percent(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100 * share << " %";
  return text.str();
}

}  // namespace

BucketStrategy bucket_strategy_of(std::string_view word) {
  constexpr std::string_view kWords[] = {"optimal",  "memory_optimal", "hardware_aware",
                                         "adaptive", "geometric",      "linear"};
  const auto found = std::ranges::find(kWords, word);
  KP_CHECK(found != std::end(kWords), "bucket plan: strategy is \"", word,
           "\"; known are optimal, memory_optimal, hardware_aware, adaptive, geometric and linear");
  return static_cast<BucketStrategy>(found - kWords);
}

BucketPlan plan_buckets(const BucketRequest& request, const DeviceInfo& device) {
  check_bucket_request(request);
  const bool is_aware = request.strategy == BucketStrategy::kHardwareAware;
  const auto round = [&](int64_t length) {
    return rounded_up(is_aware ? filled_tile(length, device) : length, request.alignment);
  };
  const Histogram seen = histogram_of(request, [](int64_t length) { return length; });
  const Histogram candidates = histogram_of(request, round);
  LengthCost cost = request.cost;
  if (request.strategy == BucketStrategy::kMemoryOptimal) cost = {.bucket = request.cost.bucket};
  const bool is_grid = request.strategy == BucketStrategy::kGeometric || request.strategy == BucketStrategy::kLinear;
  BucketPlan plan{.buckets = is_grid ? grid_buckets(request, candidates, round)
                                     : cheapest_buckets(candidates, cost, request.max_buckets)};
  double elements = 0;
  for (size_t i = 0; i < seen.lengths.size(); ++i) {
    elements += seen.counts[i] * static_cast<double>(seen.lengths[i]);
    plan.unpadded_cost += seen.counts[i] * run_cost(cost, seen.lengths[i]);
  }
  PaddedSums sums = padded_sums(seen, plan.buckets, cost);
  const PaddedSums now = request.current.empty() ? PaddedSums{.fits = false} : padded_sums(seen, request.current, cost);
  if (now.fits) plan.current_cost = now.cost;
  const double gain = now.fits && now.cost > 0 ? 1 - sums.cost / now.cost : 0;
  if (request.strategy == BucketStrategy::kAdaptive && now.fits && gain < request.least_gain) {
    plan.buckets = request.current;
    sums = now;
  }
  plan.cost = sums.cost;
  plan.padding_overhead = elements > 0 ? sums.elements / elements - 1 : 0;
  plan.changes = plan.buckets != request.current;
  plan.reason = concat(plan.buckets.size(), plan.buckets.size() == 1 ? " bucket" : " buckets", " for ",
                       seen.lengths.size(), " lengths pad by ", percent(plan.padding_overhead));
  if (now.fits) {
    plan.reason += plan.changes ? concat(" and cost ", percent(gain), " less than those in use")
                                : concat("; the best others would cost ", percent(std::max(gain, 0.0)), " less");
  } else if (!request.current.empty()) {
    plan.reason += "; those in use are too short";
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
