// Step 2: rms_norm as two plain loops per row.
//
// The first loop adds to one number. Floats may not be added in another order, so the compiler cannot use SIMD here,
// and each addition waits for the one before it: the latency of a multiply-add is the roof, not the memory.
#include "../support/rms_norm.h"

void rms_norm(const float* x, const float* weight, float* y, long rows, long columns) {
  for (long row = 0; row < rows; ++row, x += columns, y += columns) {
    float sum = 0;
    for (long i = 0; i < columns; ++i) sum += x[i] * x[i];
    const float scale = 1 / std::sqrt(sum / columns + RmsNorm::kEps);
    for (long i = 0; i < columns; ++i) y[i] = x[i] * scale * weight[i];
  }
}

int main(int count, char** words) {
  RmsNorm problem(course::is_quick(count, words));
  const double latency = course::fma_latency();
  const double copy = course::copy_rate(problem.bytes(), 1, false);
  course::roof("latency of a multiply-add", latency * 1e9, "ns");
  course::roof("copy, one thread", copy / 1e9, "GB/s");
  course::predicted("2 plain loop", problem.elements() * latency + problem.bytes() / copy,
                    "elements * latency of a multiply-add, then bytes / copy");
  problem.measure("2 plain loop", rms_norm);
  return course::finish();
}
