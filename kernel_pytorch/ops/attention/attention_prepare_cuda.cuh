// Small kernels that run before attention's own: ranges of segment ids.
#pragma once

#include "kernel_pytorch/ops/attention/attention_cuda.h"

namespace kernel_pytorch::attention {

// A warp for each 64 rows: least and greatest id.
__global__ void segment_ranges(SegmentIds segments, int32_t* ranges, int32_t rows) {
  const int32_t* ids = segments.ids + blockIdx.y * segments.batch;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kSegmentRangeRows;
  int32_t low = 0x7fffffff, high = static_cast<int32_t>(0x80000000);
  for (int32_t row = first + static_cast<int32_t>(threadIdx.x); row < least(rows, first + kSegmentRangeRows);
       row += 32) {
    low = least(low, ids[row * segments.row]);
    high = greatest(high, ids[row * segments.row]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    low = least(low, __shfl_xor_sync(0xffffffffu, low, distance));
    high = greatest(high, __shfl_xor_sync(0xffffffffu, high, distance));
  }
  if (threadIdx.x != 0) return;
  int32_t* range = ranges + blockIdx.y * segments.ranges_batch + 2 * static_cast<int64_t>(blockIdx.x);
  range[0] = low;
  range[1] = high;
}

}  // namespace kernel_pytorch::attention
