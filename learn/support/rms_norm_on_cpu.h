// What steps 7 and 8 compare their kernels with when they run on a CPU.
#pragma once

#include <cstdio>
#include <vector>

constexpr int kRows = 3, kColumns = 1024;

template <class Kernel>
int compare_on_cpu(int step, int block_threads, Kernel kernel) {
  std::vector<uint16_t> x(kRows * kColumns), weight(kColumns), y(kRows * kColumns);
  uint32_t seed = 1;
  const auto next = [&seed] {
    seed = seed * 1664525u + 1013904223u;
    return to_bf16(static_cast<int32_t>(seed) / 2147483648.0f);
  };
  for (uint16_t& value : x) value = next();
  for (uint16_t& value : weight) value = next();
  on_cpu::launch(kRows, 1, block_threads, [&] { kernel(x.data(), weight.data(), y.data(), kColumns, 1e-6f); });
  double error = 0;
  for (int row = 0; row < kRows; ++row) {
    double sum = 0;
    for (int i = 0; i < kColumns; ++i)
      sum += double(from_bf16(x[row * kColumns + i])) * from_bf16(x[row * kColumns + i]);
    for (int i = 0; i < kColumns; ++i) {
      const double expected =
          from_bf16(x[row * kColumns + i]) / std::sqrt(sum / kColumns + 1e-6) * from_bf16(weight[i]);
      const double here = std::fabs(from_bf16(y[row * kColumns + i]) - expected) / (std::fabs(expected) + 1e-3);
      error = here <= error ? error : here;
    }
  }
  std::printf("on the CPU\tstep %d, %d x %d, error %.2g (bf16 rounds to 0.004)\n", step, kRows, kColumns, error);
  return error <= 0.004 ? 0 : 1;
}
