// Indices of 32 or 64 bits, for host and device: frameworks have both.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

KP_SHARED_CODE inline int64_t index_at(const void* indices, bool are_wide, int64_t position) {
  return are_wide ? static_cast<const int64_t*>(indices)[position] : static_cast<const int32_t*>(indices)[position];
}

}  // namespace kernel_pytorch
