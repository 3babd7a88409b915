// Step 6, answers.
#include <cmath>

struct Row {
  float largest = -INFINITY, sum = 0;
};

Row merge(Row a, Row b) {
  const float largest = std::fmax(a.largest, b.largest);
  if (largest == -INFINITY) return {};
  return {largest, a.sum * std::exp(a.largest - largest) + b.sum * std::exp(b.largest - largest)};
}

template <class Scores>
Row sweep(const Scores& scores, long count) {
  Row row;
  for (long i = 0; i < count; ++i) row = merge(row, {scores[i], 1});
  return row;
}

long blocks_to_visit(long query, long queries, long keys, long block) {
  return (query + keys - queries) / block + 1;
}
