// Stands before the shipped header of this name when a kernel runs on a CPU.
#pragma once
#include "cuda.h"

namespace kernel_pytorch::tile {
struct BFloat16 {
  uint16_t bits;
};
template <class T>
struct Word;
}  // namespace kernel_pytorch::tile
