// What this process has handed to the CUDA driver so far: the counter behind "a fused op is one launch". Counted at the
// two calls that put work of ours on a stream, so nothing of a framework's is in it. Work that a CUDA graph captures is
// counted once, when it is captured; its replays are the driver's own.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::cuda_device {

struct LaunchCounts {
  uint64_t kernels = 0;
  uint64_t fills = 0;  // memory set to a value by the driver: counters and empty sums, before a kernel

  friend LaunchCounts operator-(LaunchCounts after, LaunchCounts before) {
    return {after.kernels - before.kernels, after.fills - before.fills};
  }
};

// Counts of all threads and devices. If no other thread launches, the difference of two readings is exactly what the
// calling thread launched between them.
KP_EXPORT LaunchCounts launch_counts() noexcept;

// For device/cuda: one relaxed addition each, next to a driver call of microseconds.
void count_kernel() noexcept;
void count_fill() noexcept;

}  // namespace kernel_pytorch::cuda_device
