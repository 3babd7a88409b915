// Host side of attention over latent rows on Hopper: one launch that attends and one that combines what was cut. Blocks
// plan for themselves, so nothing precedes them.
#include <algorithm>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/ops/paged_attention/latent/latent_host.h"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/tile_cuda.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/paged_attention/latent/sm90/kernel.cuh";
constexpr const char* kCodes = "takes caches of the query's type; another kernel takes codes";
constexpr const char* kUnalignedQuery = "rows of the query must begin at multiples of 16 bytes";
constexpr const char* kUnalignedOutput = "rows of the output must begin at multiples of 4 bytes";
constexpr const char* kLittleShared = "needs more shared memory per block than this GPU has";
constexpr const char* kLargeCache = "takes caches of less than 64 GiB";
constexpr int64_t kStaticBytes = 1024;  // of shared memory that the compiler lays out, with what aligns the rest

// Rows of the tile, and so blocks that share keys: one for up to 64 rows of a request, two for more.
Tile tile_of(const Attend& problem) {
  const bool is_wide = most_queries(problem) * problem.query.sizes[1] > kLatentRows;
  return {.size = kLatentSize,
          .value_size = kLatentValueSize,
          .row_warps = is_wide ? 8 : 4,
          .keys = 2 * kLatentKeys,
          .stages = 1,
          .bytes = 2,
          .warps = 8};
}

// Whether every row's place, in units of 16 bytes, is a number of 32 bits.
bool is_near(const TensorView& cache) {
  const int64_t last = (cache.sizes[0] - 1) * cache.strides[0] + (cache.sizes[1] - 1) * cache.strides[1];
  return last * size_of(cache.dtype) / 16 < int64_t{0xffffffff};
}

registry::Support supports(const Latent& problem, const DeviceInfo& device) {
  if (const char* obstacle = latent_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (problem.latent_cache.dtype != problem.query.dtype) return registry::Support::no(kCodes);
  if (!has_aligned_rows(problem.query)) return registry::Support::no(kUnalignedQuery);
  if (!has_aligned_rows(problem.output, 4)) return registry::Support::no(kUnalignedOutput);
  if (!is_near(problem.latent_cache) || !is_near(problem.rope_cache)) return registry::Support::no(kLargeCache);
  return registry::Support::unless(
      kLatentSharedBytes + kStaticBytes > device.cuda.shared_bytes_per_block ? kLittleShared : nullptr);
}

// Whether the copy engine can move 64 keys at once.
bool has_boxes(const Latent& problem) {
  return !problem.indices.is_present() && problem.latent_cache.sizes[1] % kLatentKeys == 0 &&
         cuda_device::tensor_map_obstacle(problem.latent_cache) == nullptr &&
         cuda_device::tensor_map_obstacle(problem.rope_cache) == nullptr;
}

// The last is by threads' copies, which take any page.
std::vector<std::string> configs(const Latent& problem, const DeviceInfo&) {
  const std::string text = config_text(tile_of(attend_of(problem)));
  std::vector<std::string> texts;
  if (has_boxes(problem)) texts.push_back(concat(text, " boxes=1"));
  texts.push_back(concat(text, " boxes=0"));
  return texts;
}

DeviceCode attend_code(DType dtype, const Tile& tile, bool boxes) {
  return code_of("attend_latent_sm90",
                 concat(element_type_name(dtype), ", ", device_text(tile), ", ", boxes ? "true" : "false"), kSource, 90,
                 true);
}

void run(const Latent& problem, int config, Context& context) {
  static const std::string kPlanLabel = "mla_decode plan", kLabel = "mla_decode", kCombineLabel = "mla_decode combine";
  static KernelTable<8> plans, attends, combines;
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const Attend attend = attend_of(problem);
  const Tile tile = tile_of(attend);
  const DType dtype = problem.query.dtype;
  const int share = latent_share(tile), boxes = has_boxes(problem) && config == 0 ? 1 : 0,
            variant = (2 * (share - 1) + (dtype == DType::kBFloat16 ? 0 : 1)) * 2 + boxes;
  LatentArguments arguments{.work = {.attend = latent_arguments(problem, attend)}};
  WorkArguments& work = arguments.work;
  const int64_t multiprocessors = std::max(context.info->cuda.multiprocessors, share);
  const int64_t workers = multiprocessors / share;
  set_workers(work, attend, tile, workers, context);
  const int64_t requests = attend.seq_lens.sizes[0];
  if (requests > kSharedRequests) {
    work.plan = static_cast<int64_t*>(context.scratch->allocate(static_cast<size_t>(requests + 1) * sizeof(int64_t)));
    launch(context, plans.get(variant, context, [&] { return plan_code(tile); }), 1, 1024, 0, work, kPlanLabel);
  }
  if (boxes == 1) {
    cuda_device::encode_tensor_map(problem.latent_cache, kLatentKeys, arguments.latent.words);
    cuda_device::encode_tensor_map(problem.rope_cache, kLatentKeys, arguments.rope.words);
  }
  launch(context, attends.get(variant, context, [&] { return attend_code(dtype, tile, boxes == 1); }), workers * share,
         kLatentThreads, kLatentSharedBytes, arguments, kLabel, true, boxes == 1 ? share : 1);
  launch(context, combines.get(variant, context, [&] { return combine_code(dtype, tile); }), 2 * multiprocessors,
         kCombineThreads, 0, work, kCombineLabel, true);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const int row_warps : {4, 8}) {
    const Tile tile{.size = kLatentSize,
                    .value_size = kLatentValueSize,
                    .row_warps = row_warps,
                    .keys = 2 * kLatentKeys,
                    .stages = 1,
                    .bytes = 2,
                    .warps = 8};
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const bool boxes : {true, false}) codes.push_back(attend_code(dtype, tile, boxes));
      codes.push_back(combine_code(dtype, tile));
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Latent> kLatentSm90{.name = "sm90",
                                                     .supports = supports,
                                                     .configs = configs,
                                                     .run = run,
                                                     .source_hash = source_hash,
                                                     .device_code = device_code};

}  // namespace kernel_pytorch::paged_attention
