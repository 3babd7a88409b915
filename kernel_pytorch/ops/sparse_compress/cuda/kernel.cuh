// 2:4 compression and back, one visit to memory: a thread has the 32 columns of one word of metadata in registers.
// kAligned: rows begin at multiples of 16 bytes and have a multiple of 32 columns, so that all accesses are vectors.
// sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/sparse_compress/cuda/arguments_cuda.h"

namespace kernel_pytorch::sparse_compress {

// Elements as bits: nothing is rounded on the way.
template <int kBytes>
struct BitsOf {
  using Type = uint16_t;
};
template <>
struct BitsOf<4> {
  using Type = uint32_t;
};

// The order of magnitudes, NaN last; of 16-bit types their own bits have it.
template <class Bits>
__device__ __forceinline__ uint32_t magnitude(Bits bits) {
  return bits & (sizeof(Bits) == 2 ? 0x7fffu : 0x7fffffffu);
}

// kCount elements between memory and registers.
template <bool kAligned, int kCount, class Bits>
__device__ __forceinline__ void load_bits(const Bits* source, int32_t available, Bits (&values)[kCount]) {
  if constexpr (kAligned) {
    constexpr int kVectors = kCount * static_cast<int>(sizeof(Bits)) / 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      // Through L1: a thread's vectors are halves of sectors.
      const ptx::Word4 words = ptx::ld_global_nc_v4(reinterpret_cast<const char*>(source) + 16 * i);
      const uint32_t four[4] = {words.x, words.y, words.z, words.w};
      constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
#pragma unroll
      for (int j = 0; j < 4 * kPerWord; ++j) {
        values[i * 4 * kPerWord + j] =
            static_cast<Bits>(four[j / kPerWord] >> (j % kPerWord * 8 * static_cast<int>(sizeof(Bits)) % 32));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = i < available ? source[i] : Bits{0};
  }
}
template <bool kAligned, int kCount, class Bits>
__device__ __forceinline__ void store_bits(Bits* target, int32_t available, const Bits (&values)[kCount]) {
  if constexpr (kAligned) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
    uint32_t words[kCount / kPerWord] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i / kPerWord] |= static_cast<uint32_t>(values[i])
                             << (i % kPerWord * 8 * static_cast<int>(sizeof(Bits)) % 32);
    }
#pragma unroll
    for (int i = 0; i < kCount / kPerWord; i += 4) {
      ptx::st_global_v4(reinterpret_cast<char*>(target) + 4 * i, {words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < available) target[i] = values[i];
    }
  }
}

struct Word {
  int64_t row;
  int32_t index, column, available;

  explicit __device__ __forceinline__ Word(const Arguments& arguments) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    row = thread / arguments.words;
    index = static_cast<int32_t>(thread - row * arguments.words);
    column = index * 32;
    available = min(arguments.columns - column, 32);  // none or fewer behind the last column
  }
  __device__ __forceinline__ int64_t place(const Arguments& arguments) const {
    return (index / 2 * arguments.rows + row) * 2 + index % 2;
  }
};

template <int kBytes, bool kAligned>
__global__ void __launch_bounds__(kThreads) compress(const __grid_constant__ Arguments arguments) {
  using Bits = typename BitsOf<kBytes>::Type;
  const Word word(arguments);
  if (word.row >= arguments.rows) return;
  uint32_t bits = 0x44444444u;  // places 0 and 1
  if (word.available > 0) {
    Bits values[32], kept[16];
    load_bits<kAligned>(static_cast<const Bits*>(arguments.dense) + word.row * arguments.row_stride + word.column,
                        word.available, values);
    bits = 0;
#pragma unroll
    for (int group = 0; group < 8; ++group) {
      const Bits* four = values + 4 * group;
      bool keeps[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int larger = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < i) larger += magnitude(four[j]) >= magnitude(four[i]);
          if (j > i) larger += magnitude(four[j]) > magnitude(four[i]);
        }
        keeps[i] = larger < 2;
      }
      const uint32_t first = keeps[0] ? 0 : keeps[1] ? 1 : 2, second = keeps[3] ? 3 : keeps[2] ? 2 : 1;
      kept[2 * group] = keeps[0] ? four[0] : keeps[1] ? four[1] : four[2];
      kept[2 * group + 1] = keeps[3] ? four[3] : keeps[2] ? four[2] : four[1];
      bits |= (first | second << 2) << (4 * group);
    }
    store_bits<kAligned>(static_cast<Bits*>(arguments.values) + (word.row * arguments.columns + word.column) / 2,
                         word.available / 2, kept);
  }
  arguments.metadata[word.place(arguments)] = bits;
}

template <int kBytes, bool kAligned>
__global__ void __launch_bounds__(kThreads) decompress(const __grid_constant__ Arguments arguments) {
  using Bits = typename BitsOf<kBytes>::Type;
  const Word word(arguments);
  if (word.row >= arguments.rows || word.available <= 0) return;
  Bits values[32], kept[16];
  load_bits<kAligned>(static_cast<const Bits*>(arguments.values) + (word.row * arguments.columns + word.column) / 2,
                      word.available / 2, kept);
  const uint32_t bits = arguments.metadata[word.place(arguments)];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const uint32_t places = bits >> (i / 4 * 4);
    const Bits first = kept[i / 4 * 2], second = kept[i / 4 * 2 + 1];
    values[i] = (places & 3) == i % 4 ? first : (places >> 2 & 3) == i % 4 ? second : Bits{0};
  }
  store_bits<kAligned>(static_cast<Bits*>(arguments.dense) + word.row * arguments.row_stride + word.column,
                       word.available, values);
}

}  // namespace kernel_pytorch::sparse_compress
