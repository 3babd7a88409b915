// Products of fp32 matrices by register tiles: kTileRows x kTileColumns sums stay in registers while one column of A is
// broadcast against one row of B per step. A is read with any strides (so its transpose is free), B is a panel: rows of
// up to kTileColumns neighbours. Loops over tiles belong to the caller, who knows what can be skipped.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// Six rows of four vectors are 24 sums: with four of B and a broadcast 29 of 32 registers, and the fewest loads per
// FMA. With 16 registers, six rows of two vectors take 15.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kVectorRegisters == 32 ? 4 : 2;
constexpr int kTileColumns = kTileVectors * kLanes;

// Steps of a long sum over k that are summed by themselves and then added: errors grow with the root of these and not
// of all of k. Half as many would cost another percent for stores.
constexpr int64_t kChainSteps = 192;

struct ProductA {
  const float* data;
  int64_t row_stride;   // in floats, between rows of the result
  int64_t step_stride;  // between steps of the sum
};
struct ProductB {
  const float* data;
  int64_t step_stride;
};
struct ProductC {
  float* data;
  int64_t row_stride;
};

// to[6, kVectors * kLanes] = a tile's sums, added to what is there if `add`.
template <int kVectors>
KP_PRIMITIVE void store_tile(const Vec (&sums)[kTileRows][kVectors], float* to, int64_t row_stride, bool add) {
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i, to += row_stride) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      store(to + j * kLanes, add ? sums[i][j] + load(to + j * kLanes) : sums[i][j]);
    }
  }
}

// Calls use.template operator()<kVectors>() for the vectors that a panel has: fewer than kTileVectors at a matrix's
// edge.
template <class Use>
KP_PRIMITIVE void with_vectors(int64_t vectors, const Use& use) {
  if (vectors == kTileVectors) {
    use.template operator()<kTileVectors>();
  } else if (vectors == 1) {
    use.template operator()<1>();
  } else if constexpr (kTileVectors == 4) {
    vectors == 2 ? use.template operator()<2>() : use.template operator()<3>();
  }
}

// C[6, kVectors * kLanes] = A[6, steps] B[steps, kVectors * kLanes], added to what C holds if `add`, at the end: sums
// of sums lose half of what one long chain loses. Vectors of B and C need no alignment.
template <int kVectors>
[[gnu::noinline, maybe_unused]] static void multiply_tile(const ProductA& a, const ProductB& b, int64_t steps,
                                                          const ProductC& c, bool add) {
  Vec sums[kTileRows][kVectors];
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vec{};
  }
  const float* rows = a.data;
  const float* late_rows = a.data + 3 * a.row_stride;  // two bases reach six rows with scaled strides
  const int64_t stride = a.row_stride;
  const float* from = b.data;
  for (int64_t step = 0; step < steps; ++step) {
    Vec values[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) values[j] = load(from + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      const Vec factor = broadcast(i < 3 ? rows[i * stride] : late_rows[(i - 3) * stride]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[i][j] += factor * values[j];
#if defined(__aarch64__)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        load_after(sums[i][j], rows);
        load_after(sums[i][j], late_rows);
      }
#endif
    }
    rows += a.step_stride;
    late_rows += a.step_stride;
    from += b.step_stride;
  }
  store_tile(sums, c.data, c.row_stride, add);
}

// The same for the `vectors` that a panel has.
KP_PRIMITIVE void multiply_tile(int vectors, const ProductA& a, const ProductB& b, int64_t steps, const ProductC& c,
                                bool add) {
  with_vectors(vectors, [&]<int kVectors>() { multiply_tile<kVectors>(a, b, steps, c, add); });
}

// Lane i of the first half and lane i of the second, in turn: 0 n 1 n+1 ... of the lower lanes, then of the upper.
#if KP_LANES == 16
#define KP_INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KP_INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif KP_LANES == 8
#define KP_INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define KP_INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define KP_INTERLEAVE_LOW 0, 4, 1, 5
#define KP_INTERLEAVE_HIGH 2, 6, 3, 7
#endif

// rows[i][j] becomes rows[j][i]: log2(kLanes) rounds of interleaving the first half of the vectors with the second.
KP_PRIMITIVE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], KP_INTERLEAVE_LOW);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], KP_INTERLEAVE_HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}
#undef KP_INTERLEAVE_LOW
#undef KP_INTERLEAVE_HIGH

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
