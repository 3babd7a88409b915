// Step 3: the same loops on SIMD registers, with four sums that do not wait for each other.
//
// Four chains of kLanes sums hide the latency; what is left is the time that the bytes take.
#include "../support/rms_norm.h"

using course::kLanes;
using course::load;
using course::store;
using course::Vec;

float sum_of_lanes(Vec v) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

float scale_of_row(const float* x, long columns) {
  Vec sums[4] = {};
  long i = 0;
  for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      const Vec v = load(x + i + chain * kLanes);
      sums[chain] += v * v;
    }
  }
  float sum = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < columns; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum / columns + RmsNorm::kEps);
}

void rms_norm(const float* x, const float* weight, float* y, long rows, long columns) {
  for (long row = 0; row < rows; ++row, x += columns, y += columns) {
    const float scale = scale_of_row(x, columns);
    long i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < columns; ++i) y[i] = x[i] * scale * weight[i];
  }
}

int main(int count, char** words) {
  RmsNorm problem(course::is_quick(count, words));
  const double copy = course::copy_rate(problem.bytes(), 1, false);
  course::roof("copy, one thread", copy / 1e9, "GB/s");
  course::predicted("3 SIMD", problem.bytes() / copy, "bytes / copy with one thread");
  problem.measure("3 SIMD", rms_norm);
  return course::finish();
}
