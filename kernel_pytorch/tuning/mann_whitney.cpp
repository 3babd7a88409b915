#include "kernel_pytorch/tuning/mann_whitney.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr size_t kLargestExact = 30;  // of either sample; beyond it the approximation is good to a few percent of p

// Values that are equal, in ascending order.
struct Tie {
  size_t before = 0, after = 0;
  size_t size() const { return before + after; }
};

std::vector<Tie> ties_of(std::span<const double> before, std::span<const double> after) {
  std::vector<std::pair<double, bool>> values;
  for (const double value : before) values.emplace_back(value, false);
  for (const double value : after) values.emplace_back(value, true);
  std::sort(values.begin(), values.end());
  std::vector<Tie> ties;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i == 0 || values[i].first != values[i - 1].first) ties.emplace_back();
    ++(values[i].second ? ties.back().after : ties.back().before);
  }
  return ties;
}

// Twice u, which is whole: each value of `after` beats the values of `before` below it, and half of those equal to it.
size_t doubled_u(const std::vector<Tie>& ties) {
  size_t below = 0, sum = 0;
  for (const Tie& tie : ties) {
    sum += tie.after * (2 * below + tie.before);
    below += tie.before;
  }
  return sum;
}

// Every way to call `after_count` of the values "after" is as likely as another, were both samples the same. Ways are
// counted tie by tie: ways[k][s] is how many ways to have picked k values so far give the doubled sum s of pairs.
void test_exactly(const std::vector<Tie>& ties, size_t before_count, size_t after_count, RankTest& test) {
  const size_t sums = 2 * before_count * after_count + 1;
  std::vector<std::vector<double>> ways(after_count + 1, std::vector<double>(sums, 0.0));
  ways[0][0] = 1;
  size_t seen = 0;
  for (const Tie& tie : ties) {
    std::vector<std::vector<double>> next(after_count + 1, std::vector<double>(sums, 0.0));
    for (size_t picked = 0; picked <= std::min(seen, after_count); ++picked) {
      const size_t below = seen - picked;  // values called "before" so far
      if (below > before_count) continue;
      double choices = 1;  // of `more` out of this tie
      for (size_t more = 0; more <= std::min(tie.size(), after_count - picked); ++more) {
        const size_t added = more * (2 * below + tie.size() - more);
        for (size_t sum = 0; sum + added < sums; ++sum) next[picked + more][sum + added] += choices * ways[picked][sum];
        choices *= static_cast<double>(tie.size() - more) / static_cast<double>(more + 1);
      }
    }
    ways = std::move(next);
    seen += tie.size();
  }
  const std::vector<double>& all = ways[after_count];
  const size_t here = doubled_u(ties);
  const double total = std::accumulate(all.begin(), all.end(), 0.0);
  test.p_less = std::accumulate(all.begin(), all.begin() + static_cast<ptrdiff_t>(here) + 1, 0.0) / total;
  test.p_greater = std::accumulate(all.begin() + static_cast<ptrdiff_t>(here), all.end(), 0.0) / total;
  test.is_exact = true;
}

double upper_tail(double deviations) {
  return 0.5 * std::erfc(deviations / std::sqrt(2.0));
}

void test_approximately(const std::vector<Tie>& ties, double before_count, double after_count, RankTest& test) {
  const double count = before_count + after_count, pairs = before_count * after_count;
  double tied = 0;
  for (const Tie& tie : ties) {
    const double size = static_cast<double>(tie.size());
    tied += size * size * size - size;
  }
  const double variance = pairs / 12 * (count + 1 - tied / (count * (count - 1)));
  if (variance <= 0) return;  // all values are equal
  const double deviation = std::sqrt(variance), distance = test.u - pairs / 2;
  test.p_greater = upper_tail((distance - 0.5) / deviation);
  test.p_less = upper_tail((-distance - 0.5) / deviation);
}

}  // namespace

RankTest rank_test(std::span<const double> before, std::span<const double> after) {
  KP_CHECK(!before.empty() && !after.empty(), "rank_test: ", before.size(), " and ", after.size(),
           " values; each sample needs at least one");
  for (const std::span<const double> sample : {before, after}) {
    for (const double value : sample) KP_CHECK(!std::isnan(value), "rank_test: a value is NaN, which has no rank");
  }
  const std::vector<Tie> ties = ties_of(before, after);
  RankTest test;
  test.u = static_cast<double>(doubled_u(ties)) / 2;
  if (std::max(before.size(), after.size()) <= kLargestExact) {
    test_exactly(ties, before.size(), after.size(), test);
  } else {
    test_approximately(ties, static_cast<double>(before.size()), static_cast<double>(after.size()), test);
  }
  return test;
}

std::vector<double> holm_adjusted(std::span<const double> p_values) {
  std::vector<size_t> order(p_values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p_values[a] < p_values[b]; });
  std::vector<double> adjusted(p_values.size());
  double largest = 0;
  for (size_t place = 0; place < order.size(); ++place) {
    const double raised = p_values[order[place]] * static_cast<double>(order.size() - place);
    largest = std::max(largest, std::min(1.0, raised));
    adjusted[order[place]] = largest;
  }
  return adjusted;
}

}  // namespace kernel_pytorch::tuning
