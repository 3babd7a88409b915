// A wgmma of one warp between its issue and its wait.
#pragma once

#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {

struct PendingWgmma {
  EmulatedWgmma shape;
  unsigned arrived;
  bool is_read;
  float* d[32];
  unsigned metadata[32];
  float a[16][32];
  float b[32][256];

  int depth() const {
    if (shape.type_a == kEmulatedTf32) return 8;
    const bool is_fp8 = shape.type_a == kEmulatedE4M3 || shape.type_a == kEmulatedE5M2;
    return is_fp8 || shape.sparse_selector >= 0 ? 32 : 16;
  }
};

}  // namespace emulated
