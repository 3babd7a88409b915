// What the scans by chunks on Hopper share: the tensors they take, and sequences cut into segments where heads alone do
// not fill the device.
#pragma once

#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"
#include "kernel_pytorch/ops/linear_attention/sm90/chunk_cuda.h"

namespace kernel_pytorch::linear_attention {

inline constexpr const char* kSm90Sizes = "takes 16 to 128 columns and values of the state, multiples of 8";

// Null, or why the copy engine does not take a tensor's rows.
const char* tensor_obstacle(const TensorView& view);

// How a kernel does its part: a scan of all segments, and what joins them.
struct SegmentLaunches {
  void (*scan)(const Scan& scan, ChunkArguments& arguments, bool only_states, Context& context);
  void (*join)(const Scan& scan, const JoinArguments& arguments, Context& context);
};
// `gates` sums are kept for each segment.
void run_in_segments(const Scan& scan, int64_t gates, const SegmentLaunches& launches, Context& context);

}  // namespace kernel_pytorch::linear_attention
