#include "../support/check.h"
#include EXERCISES

bool merges() {
  const Row both = merge({1.0f, 2.0f}, {3.0f, 1.5f}), first = merge({}, {2.0f, 4.0f}), last = merge({2.0f, 4.0f}, {});
  const Row none = merge({}, {});
  return both.largest == 3 && check::near(both.sum, 1.5 + 2 * std::exp(-2.0)) && first.sum == 4 && first.largest == 2 &&
         last.sum == 4 && last.largest == 2 && none.sum == 0 && none.largest == -INFINITY;
}

bool sweeps() {
  std::vector<float> scores = check::numbers(1000);
  for (float& score : scores) score *= 100;
  double largest = -1e30, sum = 0;
  for (float score : scores) largest = std::fmax(largest, score);
  for (float score : scores) sum += std::exp(score - largest);
  const check::Counted counted{scores.data()};
  const Row row = sweep(counted, 1000);
  return row.largest == float(largest) && check::near(row.sum, sum, 1e-4) && counted.reads == 1000;
}

bool visits() {
  for (long keys : {8L, 12L, 31L}) {
    for (long queries : {1L, 8L}) {
      for (long query = 0; query < queries; ++query) {
        long blocks = 0;
        for (long first = 0; first < keys; first += 4) blocks += first <= query + keys - queries;
        if (blocks_to_visit(query, queries, keys, 4) != blocks) return false;
      }
    }
  }
  return true;
}

int main() {
  check::exercise(1, "merging", merges(), "both sums are rescaled to the larger maximum; -inf - -inf is NaN");
  check::exercise(2, "one sweep", sweeps(), "a score is a part of its own: {score, 1}");
  check::exercise(3, "causal blocks", visits(), "the last key that is seen is query + keys - queries");
  return check::result();
}
