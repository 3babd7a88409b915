#include "cuda.h"

#include <set>

#include "../support/check.h"
#include EXERCISES

bool places() {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      if (sum_row(lane, i) != lane / 4 + (i > 1 ? 8 : 0) || sum_column(lane, i) / 2 != lane % 4) return false;
      seen.insert({sum_row(lane, i), sum_column(lane, i)});
    }
  }
  return seen.size() == 128;
}

bool multiplies() {
  const std::vector<float> numbers = check::numbers(16 * 16 + 8 * 16);
  std::vector<uint32_t> words(numbers.size() / 2);
  std::vector<float> rounded(numbers.size()), c(128), expected(128);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const uint32_t bits = __float_as_uint(numbers[i]) & 0xffff0000u;  // bf16 by truncation
    rounded[i] = __uint_as_float(bits);
    words[i / 2] |= i % 2 == 0 ? bits >> 16 : bits;
  }
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += double(rounded[i * 16 + k]) * rounded[256 + j * 16 + k];
      expected[i * 8 + j] = float(sum);
    }
  }
  on_cpu::launch(1, 1, 32, [&] { multiply(words.data(), words.data() + 128, c.data()); });
  return check::near(c, expected);
}

bool swizzles() {
  for (int first = 0; first < 128; first += 8) {
    for (int unit = 0; unit < 8; ++unit) {
      std::set<int> of_rows, of_units;
      for (int i = 0; i < 8; ++i) {
        of_rows.insert(swizzled_unit(first + i, unit));
        of_units.insert(swizzled_unit(first + unit, i));
      }
      if (of_rows.size() != 8 || of_units.size() != 8 || *of_rows.begin() != 0 || *of_rows.rbegin() != 7) return false;
    }
  }
  return true;
}

int main() {
  check::exercise(1, "places of sums", places(), "the 128 places are all different");
  check::exercise(2, "one mma", multiplies(), "eight words per row of a and b; store by exercise 1");
  check::exercise(3, "a swizzle", swizzles(), "exclusive or");
  return check::result();
}
