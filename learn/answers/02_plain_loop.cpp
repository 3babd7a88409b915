// Step 2, answers.
#include <cmath>

float sum_of_squares(const float* x, long count) {
  float sums[4] = {};
  long i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int chain = 0; chain < 4; ++chain) sums[chain] += x[i + chain] * x[i + chain];
  }
  for (; i < count; ++i) sums[0] += x[i] * x[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void rms_norm(const float* x, long row_stride, const float* weight, float* y, long rows, long columns, float eps) {
  for (long row = 0; row < rows; ++row, x += row_stride, y += columns) {
    const float scale = 1 / std::sqrt(sum_of_squares(x, columns) / columns + eps);
    for (long i = 0; i < columns; ++i) y[i] = x[i] * scale * weight[i];
  }
}

double predicted_seconds(double elements, double latency, double copy) {
  return elements * latency + 8 * elements / copy;
}
