// What host and device agree on: a thread has the 32 columns of a word of metadata.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::sparse_compress {

inline constexpr int kThreads = 256;

struct Arguments {
  void* dense;
  int64_t row_stride;  // elements
  int64_t rows;
  int32_t columns, words;  // words of a row: an even number
  void* values;
  uint32_t* metadata;
};

}  // namespace kernel_pytorch::sparse_compress
