#include "kernel_pytorch/ops/linear_attention/sm90/segments.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr int64_t kLeastSegmentChunks = 4;

// The heads of [batch, tokens, heads, size] in front of its tokens.
TensorView heads_first(const TensorView& view) {
  TensorView turned = view;
  std::swap(turned.sizes[1], turned.sizes[2]);
  std::swap(turned.strides[1], turned.strides[2]);
  return turned;
}

// How much of the device works while so many equal blocks run, one on a multiprocessor.
double share_of_device(int64_t blocks, int64_t processors) {
  return static_cast<double>(blocks) / static_cast<double>(divide_up(blocks, processors) * processors);
}
// Segments take a second pass over keys and values, half as long as the first.
int64_t segments_of(const Scan& scan, int64_t blocks, int64_t processors) {
  const int64_t tokens =
      scan.offsets.is_present() ? scan.value.sizes[1] / std::max<int64_t>(scan.sequences, 1) : scan.value.sizes[1];
  const int64_t most = std::min<int64_t>(tokens / (kLeastSegmentChunks * kSm90Chunk), 64);
  int64_t best = 1;
  double least = 1 / share_of_device(blocks, processors);
  for (int64_t segments = 2; segments <= most && blocks * segments <= 4 * processors; ++segments) {
    const double time = 1.55 / share_of_device(blocks * segments, processors);
    if (time < least) {
      least = time;
      best = segments;
    }
  }
  return best;
}

}  // namespace

const char* tensor_obstacle(const TensorView& view) {
  if (view.sizes[3] % 8 != 0 || view.sizes[3] < 16) return kSm90Sizes;
  return cuda_device::tensor_map_obstacle(view);
}

void run_in_segments(const Scan& scan, int64_t gates, const SegmentLaunches& launches, Context& context) {
  if (scan.sequences * scan.heads == 0) return;
  const int64_t heads = scan.sequences * scan.heads, processors = std::max(context.info->cuda.multiprocessors, 1);
  KP_CHECK(heads * 64 < int64_t{1} << 31 && scan.value.sizes[1] < int64_t{1} << 31, "linear_attention: ", heads,
           " heads of sequences, ", scan.value.sizes[1], " tokens; split the batch");
  ChunkArguments arguments{};
  arguments.scan = arguments_of(scan);
  arguments.segments = 1;
  cuda_device::encode_tensor_map(heads_first(scan.query), kSm90Chunk, arguments.query.words);
  cuda_device::encode_tensor_map(heads_first(scan.key), kSm90Chunk, arguments.key.words);
  cuda_device::encode_tensor_map(heads_first(scan.value), kSm90Chunk, arguments.value.words);
  const int64_t tiles = divide_up(scan.values(), scan.values() <= 64 ? 64 : 128);
  const int64_t segments = segments_of(scan, heads * tiles, processors);
  if (segments > 1) {
    const auto allocate = [&](int64_t count) {
      return static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(float)));
    };
    const int64_t size = heads * segments * scan.columns() * scan.values();
    float *shares = allocate(size), *starts = allocate(size), *totals = allocate(heads * segments * gates);
    arguments.segments = static_cast<int32_t>(segments);
    arguments.scan.initial = nullptr;
    arguments.scan.final = shares;
    arguments.scan.initial_is_turned = arguments.scan.final_is_turned = false;
    arguments.totals = totals;
    launches.scan(scan, arguments, true, context);
    launches.join(scan,
                  {.initial = scan.initial,
                   .final = scan.final,
                   .shares = shares,
                   .totals = totals,
                   .starts = starts,
                   .segments = arguments.segments,
                   .columns = static_cast<int32_t>(scan.columns()),
                   .values = static_cast<int32_t>(scan.values()),
                   .backwards = scan.backwards,
                   .initial_is_turned = scan.initial_is_turned,
                   .final_is_turned = scan.final_is_turned},
                  context);
    arguments.scan.initial = starts;
    arguments.scan.final = nullptr;
    arguments.totals = nullptr;
  }
  launches.scan(scan, arguments, false, context);
}

}  // namespace kernel_pytorch::linear_attention
