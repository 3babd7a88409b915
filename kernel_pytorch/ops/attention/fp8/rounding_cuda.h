// How attention in FP8 rounds its operands, alike on host and device: the scale of a block, the rotation, and what the
// kernel that rounds on the GPU is told.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::attention::fp8 {

inline constexpr int kBlockRows = 128;  // that share a scale
inline constexpr int kLargestSize = 256;

// The least power of two by which the largest magnitude fits e4m3 (448 is 1.75 * 2^8), from the bits of that magnitude.
// A power of two rounds nothing itself, so that codes times scale are values of every 16-bit type. Beyond 2^120 and
// below 2^-120 it stays; infinities become the largest code.
KP_SHARED_CODE constexpr int scale_exponent(uint32_t largest_bits) {
  const int exponent = static_cast<int>(largest_bits >> 23) - 127 - 8 + ((largest_bits & 0x7fffffu) > 0x600000u);
  return exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
}
KP_SHARED_CODE constexpr uint32_t power_of_two_bits(int exponent) {
  return static_cast<uint32_t>(exponent + 127) << 23;
}

// Incoherent processing: queries and keys are multiplied by one orthogonal matrix, random signs and then a Hadamard
// matrix, which leaves their products and spreads what stands out over all columns. Columns are filled up with zeros to
// a power of two, and the sums are multiplied by a power of two instead of the root; the scores' scale makes up for it.
KP_SHARED_CODE constexpr int rotated_columns(int columns) {
  int power = 1;
  while (power < columns) power *= 2;
  return power;
}
KP_SHARED_CODE constexpr int halved_exponent(int columns) {  // of rotated columns, 2^n: n / 2
  int exponent = 0;
  while ((1 << (exponent + 1)) <= columns) ++exponent;
  return exponent / 2;
}
KP_SHARED_CODE constexpr bool is_negated(int column) {
  constexpr uint32_t kSigns[8] = {0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu,
                                  0x1f83d9abu, 0x5be0cd19u, 0xcbbb9d5du, 0x629a292au};  // bits of no pattern
  return (kSigns[column / 32 % 8] >> (column % 32) & 1) != 0;
}

// Where a key of a block of 16 stands among the values' codes: as the accumulators of scores, taken as operands of the
// next product, are ordered. Position 4 t + i is key 8 (i / 2) + 2 t + i % 2.
KP_SHARED_CODE constexpr int key_at_position(int position) {
  return position / 16 * 16 + position % 4 / 2 * 8 + position % 16 / 4 * 2 + position % 2;
}

enum class Target : int32_t {
  kCodes,            // [batch, heads, blocks * 128, 128]
  kTransposedCodes,  // [batch, heads, target columns, blocks * 128], keys in the order above
  kValues,           // [batch, heads, rows, target columns]: codes times scale, in the source's type
};

// A tensor [batch, heads, rows, columns] to be rounded. A block of threads takes kBlockRows rows of a head.
struct RoundedTensor {
  const void* source;
  int64_t batch, head, row;  // strides in elements
  int32_t heads, rows, columns;
  int32_t blocks;       // of a head
  int32_t first_block;  // of the launch
  int32_t rotated;      // columns after a rotation; 0: none
  int32_t target_columns;
  Target kind;
  bool has_vectors;  // 16 bytes may be read at once
  void* target;
  float* scales;  // [batch, heads, blocks]; null with kValues
  float* norms;   // of the longest row of each block, no less than it is; null: not wanted
};
struct RoundArguments {
  RoundedTensor tensors[3];
};

}  // namespace kernel_pytorch::attention::fp8
