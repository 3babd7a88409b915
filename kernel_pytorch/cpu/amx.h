// Words over AMX: eight tiles of 16 rows of 64 bytes, and the product of bf16 tiles. Each is one instruction, written
// as asm: g++ 12's intrinsics leave out the memory they read, so that stores before them were seen to be deleted, and
// take no template parameter as a tile. A thread configures its tiles before the first word and releases them after the
// last.
//
// KP_EMULATE_TILES keeps the tiles in memory instead, so that machines without AMX test what is built on them.
#pragma once

#include "kernel_pytorch/cpu/bfloat16_pairs.h"

#if defined(__AVX512F__)  // whoever has tiles has these lanes

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

constexpr int kAmxRows = 16;   // of a tile; also columns of a tile of fp32
constexpr int kAmxDepth = 32;  // bf16 elements of a row: what one product sums over
constexpr int kAmxTileBytes = 1024;
constexpr int kAmxRowBytes = 64;

#if defined(KP_EMULATE_TILES)

static thread_local float emulated_tiles[8][256];

KP_PRIMITIVE void configure_tiles() {}
KP_PRIMITIVE void release_tiles() {}
template <int kTile>
KP_PRIMITIVE void zero_tile() {
  __builtin_memset(emulated_tiles[kTile], 0, kAmxTileBytes);
}
template <int kTile>
KP_PRIMITIVE void load_tile(const void* from, int64_t stride_bytes) {
  for (int i = 0; i < kAmxRows; ++i) {
    __builtin_memcpy(emulated_tiles[kTile] + 16 * i, static_cast<const char*>(from) + i * stride_bytes, kAmxRowBytes);
  }
}
template <int kTile>
KP_PRIMITIVE void store_tile(void* to, int64_t stride_bytes) {
  for (int i = 0; i < kAmxRows; ++i) {
    __builtin_memcpy(static_cast<char*>(to) + i * stride_bytes, emulated_tiles[kTile] + 16 * i, kAmxRowBytes);
  }
}
template <int kSum, int kA, int kB>
KP_PRIMITIVE void multiply_bfloat16_tiles() {
  for (int pair = 0; pair < 16; ++pair) {
    const VecU both = reinterpret_cast<VecU>(load(emulated_tiles[kB] + 16 * pair));
    const Vec even = from_bits(both << 16), odd = from_bits(both & 0xffff0000u);
    for (int i = 0; i < kAmxRows; ++i) {
      uint32_t factors;
      __builtin_memcpy(&factors, emulated_tiles[kA] + 16 * i + pair, 4);
      float* sums = emulated_tiles[kSum] + 16 * i;
      const Vec first = from_bits(broadcast(factors << 16)), second = from_bits(broadcast(factors & 0xffff0000u));
      store(sums, load(sums) + first * even + second * odd);
    }
  }
}

#else

struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

KP_PRIMITIVE void configure_tiles() {
  static constexpr TileConfiguration kConfiguration{};
  asm volatile("ldtilecfg %0" ::"m"(kConfiguration));
}
KP_PRIMITIVE void release_tiles() {
  asm volatile("tilerelease" ::: "memory");
}
template <int kTile>
KP_PRIMITIVE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
KP_PRIMITIVE void load_tile(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
KP_PRIMITIVE void store_tile(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(kTile) : "memory");
}
// tile kSum [16][16] of fp32 += A [16][32] B, where row r of B holds the pairs {B[2 r][n], B[2 r + 1][n]} of 16
// columns.
template <int kSum, int kA, int kB>
KP_PRIMITIVE void multiply_bfloat16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

#endif

// Sums [32][32] of fp32, as four tiles, in memory: rows `stride_bytes` apart and the right half `right_bytes` on.
struct AmxSums {
  void* data;
  int64_t stride_bytes;  // between rows of a tile
  int64_t right_bytes;   // from a tile to its right neighbour
  int64_t below_bytes;   // to the one below
};

// sums (+)= A B over `steps` times 32: A and B are packed tiles, two (32 rows, or 32 columns) a step, the steps
// `a_step_bytes` and `b_step_bytes` apart. Seven tiles and not eight: on cores whose other thread is busy every live
// tile costs, so both tiles of A pass through one register.
KP_PRIMITIVE void multiply_bfloat16_blocks(const void* a, int64_t a_step_bytes, const void* b, int64_t b_step_bytes,
                                           int64_t steps, const AmxSums& sums, bool add) {
  char* right = static_cast<char*>(sums.data) + sums.right_bytes;
  char* below = static_cast<char*>(sums.data) + sums.below_bytes;
  if (add) {
    load_tile<0>(sums.data, sums.stride_bytes);
    load_tile<1>(right, sums.stride_bytes);
    load_tile<2>(below, sums.stride_bytes);
    load_tile<3>(below + sums.right_bytes, sums.stride_bytes);
  } else {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  const char* from_a = static_cast<const char*>(a);
  const char* from_b = static_cast<const char*>(b);
  for (int64_t step = 0; step < steps; ++step) {
    load_tile<4>(from_b, kAmxRowBytes);
    load_tile<5>(from_b + kAmxTileBytes, kAmxRowBytes);
    load_tile<6>(from_a, kAmxRowBytes);
    multiply_bfloat16_tiles<0, 6, 4>();
    multiply_bfloat16_tiles<1, 6, 5>();
    load_tile<6>(from_a + kAmxTileBytes, kAmxRowBytes);
    multiply_bfloat16_tiles<2, 6, 4>();
    multiply_bfloat16_tiles<3, 6, 5>();
    from_a += a_step_bytes;
    from_b += b_step_bytes;
  }
  store_tile<0>(sums.data, sums.stride_bytes);
  store_tile<1>(right, sums.stride_bytes);
  store_tile<2>(below, sums.stride_bytes);
  store_tile<3>(below + sums.right_bytes, sums.stride_bytes);
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu

#endif
