#include <algorithm>

#include "../support/check.h"
#include EXERCISES

bool scales() {
  for (long count : {0, 1, 7, 8, 9, 31, 64}) {
    std::vector<float> x = check::numbers(count + 8), expected = x;
    for (long i = 0; i < count; ++i) expected[i] *= 3;
    scale(x.data(), count, 3);
    if (x != expected) return false;
  }
  return true;
}

bool finds_largest() {
  for (long count : {1, 7, 8, 9, 33}) {
    std::vector<float> x = check::numbers(count);
    for (float& value : x) value -= 2;  // all negative
    for (long at : {0L, count / 2, count - 1}) {
      std::vector<float> y = x;
      y[at] = -0.5f;
      if (largest(y.data(), count) != -0.5f) return false;
    }
  }
  return true;
}

int main() {
  check::exercise(1, "a tail", scales(), "whole registers first, then the rest one by one");
  check::exercise(2, "a maximum", finds_largest(), "begin with x[0], not with 0; the lanes meet at the end");
  check::exercise(3, "chains", chains_needed(2, 4) == 8 && chains_needed(1, 5) == 5, "in flight = starts * latency");
  return check::result();
}
