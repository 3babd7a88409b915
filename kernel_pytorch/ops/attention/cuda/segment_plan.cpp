// Launches what finds the tiles that segment ids leave (attention/cuda/segment_plan.cuh).
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/attention/cuda/segment_plan.cuh";
constexpr int kThreads = 128;

// What walks depend on, and nothing else: few kernels are compiled for all features.
Features relevant(const Features& features) {
  return {.right_bound = features.right_bound,
          .left_bound = features.left_bound,
          .key_lengths = features.key_lengths,
          .segments = true};
}

}  // namespace

DeviceCode segment_plan_code(const Features& features, const WalkTiles& tiles) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::attention::plan_segments<", device_text(relevant(features)), ", ",
                          bool_name(tiles.over_keys), ", ", tiles.rows, ", ", tiles.columns, ">")};
}

void plan_segments(const Features& features, const WalkTiles& tiles, ScoreArguments& arguments, Context& context) {
  static const std::string kLabel = "attention segment plan";
  static FeatureKernels kernels;
  if (!features.segments || features.packed || features.blocks) return;
  const uint32_t variant = static_cast<uint32_t>((tiles.rows * 256 + tiles.columns) * 2 + int{tiles.over_keys});
  CUkern_st* kernel =
      kernels.get(relevant(features), variant, context, [&] { return segment_plan_code(features, tiles); });
  const int64_t count =
      divide_up(tiles.over_keys ? arguments.queries : arguments.keys, tiles.rows) * int64_t{arguments.batches};
  if (count == 0) return;
  auto* spans = static_cast<WalkSpan*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(WalkSpan)));
  (tiles.over_keys ? arguments.key_spans : arguments.query_spans) = spans;
  void* pointers[] = {&arguments, &spans};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(count * 32, kThreads));
  shape.block_x = kThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

}  // namespace kernel_pytorch::attention
