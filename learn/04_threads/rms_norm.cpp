// Step 4: all cores, and only the bytes that must move.
//
// Three versions on all threads. The first sweeps over the whole tensor twice, so x comes from memory twice. The second
// works row by row: the second loop finds the row in the L1 cache. The third writes with streaming stores, which do not
// read a cache line before overwriting it.
#include "../support/rms_norm.h"

using course::kLanes;
using course::load;
using course::Vec;

float scale_of_row(const float* x, long columns) {
  Vec sums[4] = {};
  for (long i = 0; i < columns; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      const Vec v = load(x + i + chain * kLanes);
      sums[chain] += v * v;
    }
  }
  const Vec all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += all[lane];
  return 1 / std::sqrt(sum / columns + RmsNorm::kEps);
}

void two_sweeps(const float* x, const float* weight, float* y, long rows, long columns) {
  static std::vector<float> scales;
  scales.resize(rows);
#pragma omp parallel for
  for (long row = 0; row < rows; ++row) scales[row] = scale_of_row(x + row * columns, columns);
#pragma omp parallel for
  for (long row = 0; row < rows; ++row) {
    for (long i = 0; i < columns; i += kLanes) {
      course::store(y + row * columns + i, load(x + row * columns + i) * scales[row] * load(weight + i));
    }
  }
}

template <bool kStreaming>
void row_by_row(const float* x, const float* weight, float* y, long rows, long columns) {
#pragma omp parallel for
  for (long row = 0; row < rows; ++row) {
    const float* from = x + row * columns;
    float* to = y + row * columns;
    const float scale = scale_of_row(from, columns);
    for (long i = 0; i < columns; i += kLanes) {
      const Vec result = load(from + i) * scale * load(weight + i);
      kStreaming ? course::stream(to + i, result) : course::store(to + i, result);
    }
    if (kStreaming) course::wait_for_streams();
  }
}

int main(int count, char** words) {
  RmsNorm problem(course::is_quick(count, words));
  const int threads = course::all_threads();
  const double copy = course::copy_rate(problem.bytes(), threads, false);
  const double streaming = course::copy_rate(problem.bytes(), threads, true);
  course::roof("copy, all threads", copy / 1e9, "GB/s");
  course::roof("copy, all threads, streaming stores", streaming / 1e9, "GB/s");
  course::predicted("4 threads, two sweeps", 1.5 * problem.bytes() / copy,
                    "x twice and y once, / copy with all threads");
  course::predicted("4 threads, row by row", problem.bytes() / copy, "bytes / copy with all threads");
  course::predicted("4 threads, streaming stores", problem.bytes() / streaming, "bytes / copy with streaming stores");
  problem.measure("4 threads, two sweeps", two_sweeps);
  problem.measure("4 threads, row by row", row_by_row<false>);
  problem.measure("4 threads, streaming stores", row_by_row<true>);
  return course::finish();
}
