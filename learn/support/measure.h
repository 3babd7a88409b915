// What the CPU steps share: a clock, inputs, roofs measured on this machine, and the lines that `kpt learn` reads.
//
// A step first measures its roofs, then writes its prediction, and only then runs the kernel. Lines are separated by
// tabs: "roof NAME VALUE UNIT", "predicted NAME SECONDS HOW", "measured NAME SECONDS BYTES FLOPS ERROR".
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace course {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
// One SIMD register of floats: + - * / work on all lanes. Vec must be aligned, Loose may lie anywhere.
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float Loose __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vec load(const float* p) {
  return *reinterpret_cast<const Loose*>(p);
}
inline void store(float* p, Vec v) {
  *reinterpret_cast<Loose*>(p) = v;
}
// A streaming store goes to memory around the caches and does not read the line first; p is aligned.
inline void stream(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, v);
#elif defined(__AVX__)
  _mm256_stream_ps(p, v);
#elif defined(__x86_64__)
  _mm_stream_ps(p, v);
#else
  store(p, v);
#endif
}
inline void wait_for_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Floats that begin at a multiple of 64 bytes: a cache line, and the widest SIMD register.
struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], Free>;
inline Floats make_floats(size_t count) {
  return Floats(static_cast<float*>(std::aligned_alloc(64, (count * 4 + 63) / 64 * 64)));
}
// Between -1 and 1, the same in every run. Zeros would run faster than real data.
inline Floats random_floats(size_t count, uint32_t seed) {
  Floats values = make_floats(count);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = static_cast<float>(static_cast<int32_t>(seed)) / 2147483648.0f;
  }
  return values;
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The lower quartile of runs that take `seconds` together, after one that warms caches and page tables: what other
// programs on the machine do can only add time.
inline double run_seconds = 0.25;  // --quick takes less
template <class Run>
double typical_seconds(Run&& run, double seconds = run_seconds) {
  run();
  std::vector<double> times;
  const double end = now() + seconds;
  do {
    const double start = now();
    run();
    times.push_back(now() - start);
  } while (now() < end && times.size() < 1000);
  std::nth_element(times.begin(), times.begin() + times.size() / 4, times.end());
  return times[times.size() / 4];
}

// The compiler must assume that the value is used.
template <class T>
inline void keep(T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

// ---- roofs ----

// Bytes read and written per second by a copy of half as many bytes.
inline double copy_rate(size_t bytes, int threads, bool streaming) {
  const size_t rows = bytes / 2 / 16384;  // of 4096 floats
  Floats from = random_floats(rows * 4096, 1), to = random_floats(rows * 4096, 2);
  const float* source = from.get();
  float* target = to.get();
  const double seconds = typical_seconds([&] {
#pragma omp parallel for num_threads(threads)
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = row * 4096; i < row * 4096 + 4096; i += kLanes) {
        streaming ? stream(target + i, load(source + i)) : store(target + i, load(source + i));
      }
      if (streaming) wait_for_streams();
    }
  });
  return 2.0 * rows * 16384 / seconds;
}

// Seconds from one multiply-add to the next that needs its result.
inline double fma_latency() {
  constexpr int kCount = 1 << 20;
  float x = 0.5f, factor = 0.999f;
  const double seconds = typical_seconds([&] {
    keep(factor);
    for (int i = 0; i < kCount; ++i) x = x * factor + 0.25f;
    keep(x);
  });
  return seconds / kCount;
}

// Floating-point operations per second of independent multiply-adds in registers.
inline double fma_rate(int threads) {
  constexpr int kChains = 12, kCount = 1 << 18;
  const double seconds = typical_seconds([&] {
#pragma omp parallel num_threads(threads)
    {
      Vec sums[kChains] = {}, factor = Vec{} + 0.999f;
      keep(factor);
      for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) sums[chain] = sums[chain] * factor + factor;
      }
      keep(sums);
    }
  });
  return 2.0 * kChains * kLanes * kCount * threads / seconds;
}

inline int all_threads() {
  return omp_get_max_threads();
}

// ---- lines ----

inline void problem(const char* text) {
  std::printf("problem\t%s\n", text);
}
inline void roof(const char* name, double value, const char* unit) {
  std::printf("roof\t%s\t%.9g\t%s\n", name, value, unit);
}
inline void predicted(const char* name, double seconds, const char* how) {
  std::printf("predicted\t%s\t%.9g\t%s\n", name, seconds, how);
}

inline bool all_right = true;
// The largest difference from `expected`, as a share of its largest value.
inline double error_of(const float* result, const float* expected, size_t count) {
  double difference = 0, largest = 1e-30;
  for (size_t i = 0; i < count; ++i) {
    const double here = std::fabs(static_cast<double>(result[i]) - expected[i]);
    difference = here <= difference ? difference : here;  // NaN is taken
    largest = std::max(largest, std::fabs(static_cast<double>(expected[i])));
  }
  return difference / largest;
}
inline void measured(const char* name, double seconds, double bytes, double flops, double error,
                     double allowed = 1e-5) {
  std::printf("measured\t%s\t%.9g\t%.9g\t%.9g\t%.3g\n", name, seconds, bytes, flops, error);
  if (!(error <= allowed)) {
    std::printf("wrong\t%s\terror %.3g, allowed %.3g\n", name, error, allowed);
    all_right = false;
  }
  std::fflush(stdout);
}
inline int finish() {
  return all_right ? 0 : 1;
}

inline bool is_quick(int count, char** words) {
  const bool quick = count > 1 && std::strcmp(words[1], "--quick") == 0;
  if (quick) run_seconds = 0.01;
  return quick;
}

}  // namespace course
