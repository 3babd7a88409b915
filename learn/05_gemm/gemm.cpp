// Step 5: C = A B of n x n matrices, five times, each version with one idea more.
//
//   naive          one sum at a time: bound by the latency of a multiply-add, as step 2 was
//   register tile  6 x 64 sums in registers: bound by the rate of multiply-adds
//   packed         A and B copied into the order in which they are read, in pieces that fit the L2 cache
//   threads        blocks of rows of C on all cores
//   bf16 dot       two products per lane and instruction, where the CPU has it (AVX512_BF16)
#include "../support/register_tile.h"

using course::Floats;
using course::kLanes;
using course::Vec;

constexpr long kDepth = 384;     // of a piece along k: a panel of B is 384 * 64 * 4 = 96 KB
constexpr long kBlockRows = 96;  // of A: 96 * 384 * 4 = 144 KB

void naive(const float* a, const float* b, float* c, long n) {
  for (long i = 0; i < n; ++i) {
    for (long j = 0; j < n; ++j) {
      float sum = 0;
      for (long k = 0; k < n; ++k) sum += a[i * n + k] * b[k * n + j];
      c[i * n + j] = sum;
    }
  }
}

void add_to(float* c, long n, const Vec (&sums)[kTileRows][kTileVecs], bool first) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int v = 0; v < kTileVecs; ++v) {
      float* to = c + r * n + v * kLanes;
      course::store(to, first ? sums[r][v] : course::load(to) + sums[r][v]);
    }
  }
}

void tiles(const float* a, const float* b, float* c, long n) {
  for (long i = 0; i < n; i += kTileRows) {
    for (long j = 0; j < n; j += kTileColumns) {
      Vec sums[kTileRows][kTileVecs] = {};
      register_tile(a + i * n, n, 1, b + j, n, n, sums);
      add_to(c + i * n + j, n, sums, true);
    }
  }
}

// A as [n / 6][k][6], B as [n / 64][k][64]; then both are read from front to back.
void packed(const float* a, const float* b, float* c, long n, int threads) {
  static Floats packed_a = course::make_floats(n * n), packed_b = course::make_floats(n * n);
  float *pa = packed_a.get(), *pb = packed_b.get();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (long i = 0; i < n / kTileRows; ++i) {
      for (long k = 0; k < n; ++k) {
        for (int r = 0; r < kTileRows; ++r) pa[(i * n + k) * kTileRows + r] = a[(i * kTileRows + r) * n + k];
      }
    }
#pragma omp for
    for (long j = 0; j < n / kTileColumns; ++j) {
      for (long k = 0; k < n; ++k) {
        std::memcpy(pb + (j * n + k) * kTileColumns, b + k * n + j * kTileColumns, kTileColumns * 4);
      }
    }
    for (long k = 0; k < n; k += kDepth) {
      const long depth = std::min(kDepth, n - k);
#pragma omp for schedule(dynamic)
      for (long block = 0; block < n; block += kBlockRows) {
        for (long j = 0; j < n / kTileColumns; ++j) {
          for (long i = block; i < std::min(block + kBlockRows, n); i += kTileRows) {
            Vec sums[kTileRows][kTileVecs] = {};
            register_tile(pa + i * n + k * kTileRows, 1, kTileRows, pb + (j * n + k) * kTileColumns, kTileColumns,
                          depth, sums);
            add_to(c + i * n + j * kTileColumns, n, sums, k == 0);
          }
        }
      }
    }
  }
}

#if defined(__AVX512BF16__)
// Pairs of neighbours along k in one 32-bit lane: vdpbf16ps multiplies both and adds both to the lane's sum.
uint32_t pair(float low, float high) {
  uint32_t bits[2];
  std::memcpy(&bits[0], &low, 4);
  std::memcpy(&bits[1], &high, 4);
  for (uint32_t& word : bits) word = (word + 0x7fff + (word >> 16 & 1)) >> 16;  // to nearest even
  return bits[0] | bits[1] << 16;
}

void bf16_dot(const uint32_t* pa, const uint32_t* pb, float* c, long n) {
#pragma omp parallel for schedule(dynamic)
  for (long block = 0; block < n; block += kBlockRows) {
    for (long j = 0; j < n / kTileColumns; ++j) {
      for (long i = block; i < std::min(block + kBlockRows, n); i += kTileRows) {
        __m512 sums[kTileRows][kTileVecs] = {};
        for (long k = 0; k < n / 2; ++k) {
          const uint32_t* of_b = pb + (j * (n / 2) + k) * kTileColumns;
#pragma GCC unroll 6
          for (int r = 0; r < kTileRows; ++r) {
            const auto of_a = (__m512bh)_mm512_set1_epi32(pa[(i / kTileRows * (n / 2) + k) * kTileRows + r]);
#pragma GCC unroll 4
            for (int v = 0; v < kTileVecs; ++v) {
              sums[r][v] = _mm512_dpbf16_ps(sums[r][v], of_a, (__m512bh)_mm512_loadu_si512(of_b + v * kLanes));
            }
          }
        }
        for (int r = 0; r < kTileRows; ++r) {
          for (int v = 0; v < kTileVecs; ++v)
            _mm512_storeu_ps(c + (i + r) * n + j * kTileColumns + v * kLanes, sums[r][v]);
        }
      }
    }
  }
}

double bf16_rate(int threads) {
  constexpr int kChains = 12, kCount = 1 << 17;
  const double seconds = course::typical_seconds([&] {
#pragma omp parallel num_threads(threads)
    {
      __m512 sums[kChains] = {};
      __m512i ones = _mm512_set1_epi32(0x3f803f80);
      course::keep(ones);
      for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) {
          sums[chain] = _mm512_dpbf16_ps(sums[chain], (__m512bh)ones, (__m512bh)ones);
        }
      }
      course::keep(sums);
    }
  });
  return 4.0 * kChains * kLanes * kCount * threads / seconds;
}

void measure_bf16(const float* a, const float* b, float* c, long n, const float* expected) {
  std::vector<uint32_t> pa(n * n / 2), pb(n * n / 2);
  for (long k = 0; k < n / 2; ++k) {
    for (long i = 0; i < n; ++i) {
      pa[(i / kTileRows * (n / 2) + k) * kTileRows + i % kTileRows] = pair(a[i * n + 2 * k], a[i * n + 2 * k + 1]);
      pb[(i / kTileColumns * (n / 2) + k) * kTileColumns + i % kTileColumns] =
          pair(b[2 * k * n + i], b[(2 * k + 1) * n + i]);
    }
  }
  const double rate = bf16_rate(course::all_threads()), flops = 2.0 * n * n * n;
  course::roof("bf16 dot products, all threads", rate / 1e9, "GFLOP/s");
  course::predicted("5 bf16 dot, threads", flops / rate, "FLOPs / rate of bf16 dot products");
  const double seconds = course::typical_seconds([&] { bf16_dot(pa.data(), pb.data(), c, n); });
  course::measured("5 bf16 dot, threads", seconds, 8.0 * n * n, flops, course::error_of(c, expected, n * n), 1e-2);
}
#endif

int main(int count, char** words) {
  const long n = course::is_quick(count, words) ? 192 : 768;
  char text[80];
  std::snprintf(text, sizeof text, "C = A B of %ld x %ld fp32", n, n);
  course::problem(text);
  const double flops = 2.0 * n * n * n, bytes = 12.0 * n * n;
  const double latency = course::fma_latency(), one = course::fma_rate(1),
               all = course::fma_rate(course::all_threads());
  course::roof("latency of a multiply-add", latency * 1e9, "ns");
  course::roof("multiply-adds, one thread", one / 1e9, "GFLOP/s");
  course::roof("multiply-adds, all threads", all / 1e9, "GFLOP/s");
  course::predicted("5 naive", flops / 2 * latency, "multiply-adds * their latency");
  course::predicted("5 register tile", flops / one, "FLOPs / rate of multiply-adds");
  course::predicted("5 packed", flops / one, "FLOPs / rate of multiply-adds");
  course::predicted("5 packed, threads", flops / all, "FLOPs / rate of all threads");

  Floats a = course::random_floats(n * n, 1), b = course::random_floats(n * n, 2), c = course::make_floats(n * n);
  Floats expected = course::make_floats(n * n);
  const double naive_seconds = course::typical_seconds([&] { naive(a.get(), b.get(), expected.get(), n); }, 0);
  course::measured("5 naive", naive_seconds, bytes, flops, 0);
  const auto measure = [&](const char* name, auto&& kernel) {
    std::fill(c.get(), c.get() + n * n, 0.0f);
    const double seconds = course::typical_seconds([&] { kernel(a.get(), b.get(), c.get(), n); });
    course::measured(name, seconds, bytes, flops, course::error_of(c.get(), expected.get(), n * n));
  };
  measure("5 register tile", tiles);
  measure("5 packed", [](auto... words) { packed(words..., 1); });
  measure("5 packed, threads", [](auto... words) { packed(words..., course::all_threads()); });
#if defined(__AVX512BF16__)
  measure_bf16(a.get(), b.get(), c.get(), n, expected.get());
#endif
  return course::finish();
}
