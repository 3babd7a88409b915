#include "../support/check.h"
#include EXERCISES

bool reads_once() {
  const long depth = 37;
  const std::vector<float> a = check::numbers(4 * depth), b = check::numbers(8 * depth, 3);
  std::vector<float> c(32), expected(32);
  for (long i = 0; i < 4; ++i) {
    for (long j = 0; j < 8; ++j) {
      double sum = 0;
      for (long k = 0; k < depth; ++k) sum += double(a[i * depth + k]) * b[k * 8 + j];
      expected[i * 8 + j] = float(sum);
    }
  }
  const check::Counted of_a{a.data()}, of_b{b.data()};
  multiply_tile(of_a, of_b, c.data(), depth);
  return check::near(c, expected) && of_a.reads <= 4 * depth && of_b.reads <= 8 * depth;
}

bool packs() {
  const long depth = 5, columns = 24;
  const std::vector<float> b = check::numbers(depth * columns);
  std::vector<float> panels(depth * columns);
  pack(b.data(), depth, columns, panels.data());
  for (long k = 0; k < depth; ++k) {
    for (long j = 0; j < columns; ++j) {
      if (panels[(j / 8 * depth + k) * 8 + j % 8] != b[k * columns + j]) return false;
    }
  }
  return true;
}

int main() {
  check::exercise(1, "a register tile", reads_once(), "k outside, 32 sums inside: 4 + 8 reads per step of k");
  check::exercise(2, "packing", packs(), "panel, then k, then column");
  check::exercise(3, "intensity", check::near(intensity(6, 64), 768.0 / 280) && check::near(intensity(1, 1), 0.25),
                  "2 * rows * columns FLOPs, 4 * (rows + columns) bytes");
  return check::result();
}
