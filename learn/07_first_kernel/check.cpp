#include "cuda.h"

#include "../support/check.h"
#include EXERCISES

bool adds() {
  for (int count : {1, 63, 200, 1000}) {
    const std::vector<float> x = check::numbers(count);
    std::vector<float> y(count + 1, -7.0f), expected = y;
    for (int i = 0; i < count; ++i) expected[i] = x[i] + 1;
    on_cpu::launch(3, 1, 64, [&] { add_one(x.data(), y.data(), count); });
    if (y != expected) return false;
  }
  return true;
}

bool finds_maxima() {
  for (int columns : {64, 65, 300}) {
    std::vector<float> x = check::numbers(4 * columns), result(4), expected(4, -1e30f);
    for (float& value : x) value -= 3;
    for (int i = 0; i < 4 * columns; ++i) expected[i / columns] = std::fmax(expected[i / columns], x[i]);
    on_cpu::launch(4, 1, 64, [&] { row_maximum(x.data(), result.data(), columns); });
    if (result != expected) return false;
  }
  return true;
}

int main() {
  check::exercise(1, "a grid of any size", adds(), "begin at blockIdx.x * blockDim.x + threadIdx.x");
  check::exercise(2, "a maximum by a block", finds_maxima(), "each thread its own columns, then halves, with barriers");
  check::exercise(3, "Little's law", check::near(bytes_per_second(132, 2048, 2, 600e-9), 132 * 2048 * 2 / 600e-9),
                  "bytes under way / latency");
  return check::result();
}
