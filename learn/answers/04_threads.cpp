// Step 4, answers.
#include <algorithm>
#include <vector>

long first_row(long rows, int threads, int thread) {
  return rows * thread / threads;
}

double bus_bytes(double bytes, bool streaming) {
  return (streaming ? 2 : 3) * bytes;
}

float sum(const std::vector<float>& values, int threads) {
  const size_t blocks = (values.size() + 1023) / 1024;
  std::vector<float> parts(blocks);
  for (int thread = 0; thread < threads; ++thread) {
    for (size_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; ++block) {
      for (size_t i = block * 1024; i < std::min(block * 1024 + 1024, values.size()); ++i) parts[block] += values[i];
    }
  }
  float total = 0;
  for (float part : parts) total += part;
  return total;
}
