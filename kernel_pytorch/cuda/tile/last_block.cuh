// A grid that knows which of its blocks comes last, so that what follows from all blocks needs no second launch. The
// counter is zero before the kernel starts (a memset ahead of it in the stream).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::tile {

// For one thread of each block; true once, in the last of `blocks` calls. What the thread wrote before is visible to
// the last caller after this call. Threads of a block must meet at a barrier before their writes count as this one's.
__device__ __forceinline__ bool arrives_last(uint32_t* counter, uint32_t blocks) {
  __threadfence();
  const bool is_last = atomicAdd(counter, 1u) == blocks - 1;
  __threadfence();
  return is_last;
}

}  // namespace kernel_pytorch::tile
