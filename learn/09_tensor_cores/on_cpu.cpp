// Step 9's kernel on a CPU, thread by thread: whether it is right, not how fast it is.
#include "cuda.h"

#include "gemm.cu"

#include <cstdio>
#include <vector>

int main() {
  constexpr int kM = 128, kN = 256, kK = 256;
  std::vector<uint16_t> a(kM * kK), b(kN * kK), c(kM * kN);
  uint32_t seed = 1;
  for (std::vector<uint16_t>* values : {&a, &b}) {
    for (uint16_t& value : *values) {
      seed = seed * 1664525u + 1013904223u;
      value = to_bf16(static_cast<int32_t>(seed) / 2147483648.0f);
    }
  }
  double error = 0;
  for (const auto kernel : {gemm_in_turn, gemm_ahead}) {
    c.assign(c.size(), 0);
    on_cpu::launch(kN / kTile, kM / kTile, kThreads, [&] { kernel(a.data(), b.data(), c.data(), kN, kK); });
    for (int i = 0; i < kM; ++i) {
      for (int j = 0; j < kN; ++j) {
        double expected = 0;
        for (int k = 0; k < kK; ++k) expected += double(from_bf16(a[i * kK + k])) * from_bf16(b[j * kK + k]);
        const double here = std::fabs(from_bf16(c[i * kN + j]) - expected) / (std::fabs(expected) + 1);
        error = here <= error ? error : here;
      }
    }
  }
  std::printf("on the CPU\tstep 9, %d x %d x %d, error %.2g (bf16 rounds to 0.004)\n", kM, kN, kK, error);
  return error <= 0.004 ? 0 : 1;
}
