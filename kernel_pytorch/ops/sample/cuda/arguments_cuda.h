// What host and device agree on: a block takes a row, each of its warps a part of the vocabulary.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::sample {

inline constexpr int kThreads = 1024, kWarps = kThreads / 32;

struct DrawArguments {
  const void* logits;
  int64_t row_stride;
  const float *temperature, *top_p, *min_p;  // or null
  const int32_t* top_k;
  const void *seeds, *positions;
  int32_t* tokens;
  int32_t count;                            // of the vocabulary
  bool has_wide_seeds, has_wide_positions;  // int64, not int32
  bool is_aligned;                          // rows may be read 16 bytes at a time
};

}  // namespace kernel_pytorch::sample
