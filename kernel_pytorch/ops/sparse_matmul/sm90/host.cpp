// Host side of the product with a 2:4 weight on Hopper.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"
#include "kernel_pytorch/ops/sparse_matmul/sm90/arguments_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::sparse_matmul {

constexpr auto kConfigFields = config_fields<Config>(config_field<&Config::rows>(), config_field<&Config::stages>(),
                                                     config_field<&Config::cluster>(), config_field<&Config::boxes>());
constexpr ConfigFields fields_of(const Config&) {
  return kConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/sparse_matmul/sm90/kernel.cuh";
constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kMisaligned =
    "rows of x, values or the output do not begin at multiples of 16 bytes, or n is odd";

// Behind a row, bf16 on an H200: TFLOP/s of the dense product at 8192 and 4096 cubed.
constexpr Config kConfigs[] = {
    {.rows = 256, .stages = 4, .cluster = 2},              // 1011, 1013
    {.rows = 256, .stages = 5, .cluster = 2, .boxes = 1},  // 1019, 906
    {.rows = 256, .stages = 4, .cluster = 1},              // 994, 971
    {.rows = 128, .stages = 6, .cluster = 2},              // 801, 763
    {.rows = 128, .stages = 6, .cluster = 1},
    {.rows = 64, .stages = 8, .cluster = 1},
};
static_assert(are_legal(kConfigs));
constexpr int kConfigCount = static_cast<int>(std::size(kConfigs));

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (size_of(problem.x.dtype) != 2 || cuda_type_index(problem.x.dtype) < 0) return registry::Support::no(kNeeds16Bit);
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.values.sizes[0];
  if (m == 0 || n == 0 || k == 0) return registry::Support::no(kNothing);
  const bool is_aligned = has_aligned_rows(problem.x) && has_aligned_rows(problem.values) &&
                          has_aligned_rows(problem.output) && n % 2 == 0 &&
                          reinterpret_cast<uintptr_t>(problem.metadata.data) % 16 == 0;
  if (!is_aligned) return registry::Support::no(kMisaligned);
  return registry::Support::unless(product::sm90_size_obstacle({1, n, m, k}));
}

std::vector<std::string> configs(const Product&, const DeviceInfo&) {
  return config_texts(kConfigs);
}

int64_t clusters_of(const Config& config, const Product& problem) {
  return divide_up(problem.values.sizes[0], int64_t{kWeightRows} * config.cluster) *
         divide_up(problem.x.sizes[0], config.rows);
}

// The least time: whole waves of tiles, each as long as what it reads of shared memory for a stage (x for each
// warpgroup, the weight, and both on their way in), which is what limits the sparse instructions.
int heuristic(const Product& problem, const DeviceInfo& device) {
  int best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kConfigCount; ++i) {
    const Config& config = kConfigs[i];
    const int64_t resident = std::max(device.cuda.multiprocessors / config.cluster, 1);
    const int64_t waves = divide_up(clusters_of(config, problem), resident);
    const int64_t stage = 3 * x_bytes(config) + 2 * kWeightBytes;
    const int64_t time = waves * (divide_up(problem.x.sizes[1], kStageColumns) + 3) * stage;
    if (time < least) {
      least = time;
      best = i;
    }
  }
  return best;
}

DeviceCode code_of(const Config& config, DType dtype, pointwise::Kind kind, int bias) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::sparse_matmul::sparse_product<", device_text(config), ", ",
                          element_type_name(dtype), ", kernel_pytorch::pointwise::Kind(", static_cast<int>(kind),
                          "), kernel_pytorch::sparse_matmul::Bias(", bias, ")>"),
          .minimum_capability = 90,
          .architecture_specific = true};
}

void run(const Product& problem, int index, Context& context) {
  static const std::string kLabel = "sparse_matmul sm90";
  static KernelTable<kConfigCount * 2 * pointwise::kKindCount * 3> kernels;
  const Config& config = kConfigs[index];
  const DType dtype = problem.x.dtype;
  const int bias = !problem.bias.is_present() ? 0 : problem.bias.dtype == dtype ? 1 : 2;
  const int entry =
      ((index * 2 + (dtype == DType::kFloat16)) * pointwise::kKindCount + static_cast<int>(problem.activation)) * 3 +
      bias;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return code_of(config, dtype, problem.activation, bias); });
  Arguments arguments{};
  cuda_device::encode_tensor_map(product::sm90_batch_of_one(problem.values), kWeightRows, arguments.product.a.words, 1,
                                 kStageColumns);
  cuda_device::encode_tensor_map(product::sm90_batch_of_one(problem.x), config.rows / config.cluster,
                                 arguments.product.b.words);
  cuda_device::encode_tensor_map(product::sm90_batch_of_one(problem.output), kBoxRows, arguments.product.output.words);
  const int64_t n = problem.values.sizes[0];
  constexpr int64_t kGroupRows = 2048;  // of the weight: tiles that run together share them in L2
  const int64_t cluster_rows = int64_t{kWeightRows} * config.cluster;
  arguments.product.order = {.tiles_m = static_cast<int32_t>(divide_up(n, cluster_rows)),
                             .tiles_n = static_cast<int32_t>(divide_up(problem.x.sizes[0], config.rows)),
                             .batches = 1,
                             .group = static_cast<int32_t>(kGroupRows / cluster_rows),
                             .total = static_cast<int32_t>(clusters_of(config, problem))};
  arguments.product.m = static_cast<int32_t>(n);
  arguments.product.n = static_cast<int32_t>(problem.x.sizes[0]);
  arguments.product.k_stages = static_cast<int32_t>(divide_up(problem.x.sizes[1], kStageColumns));
  arguments.product.bias = problem.bias.data;
  arguments.metadata = problem.metadata.as<const uint32_t>();
  const auto cluster = static_cast<unsigned>(config.cluster);
  const auto clusters = static_cast<unsigned>(std::max(context.info->cuda.multiprocessors, 2)) / cluster;
  cuda_device::LaunchShape shape;
  shape.grid_x = std::min(clusters, static_cast<unsigned>(arguments.product.order.total)) * cluster;
  shape.block_x = product::kSm90Threads;
  shape.cluster_x = cluster;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes(config));
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const Config& config : kConfigs) {
    codes.push_back(code_of(config, DType::kBFloat16, pointwise::Kind::kIdentity, 0));
  }
  codes.push_back(code_of(kConfigs[0], DType::kFloat16, pointwise::Kind::kGelu, 1));
  codes.push_back(code_of(kConfigs[3], DType::kBFloat16, pointwise::Kind::kSilu, 2));
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Product> kSm90{.name = "sm90",
                                                .supports = supports,
                                                .configs = configs,
                                                .heuristic = heuristic,
                                                .run = run,
                                                .source_hash = source_hash,
                                                .device_code = device_code};

}  // namespace kernel_pytorch::sparse_matmul
