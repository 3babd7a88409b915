// The host side of the CUDA kernels of cross entropy: cuda_cluster for wide rows of aligned vectors, cuda_block for
// everything, and the rescaling.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/cross_entropy/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::cross_entropy {
constexpr auto kClusterConfigFields =
    config_fields<ClusterConfig>(config_field<&ClusterConfig::consumers>(), config_field<&ClusterConfig::blocks>());
constexpr ConfigFields fields_of(const ClusterConfig&) {
  return kClusterConfigFields;
}

namespace {

constexpr const char* kBlockSource = "kernel_pytorch/ops/cross_entropy/cuda/block.cuh";
constexpr const char* kClusterSource = "kernel_pytorch/ops/cross_entropy/cuda/cluster.cuh";
constexpr const char* kNarrow = "rows this narrow are as fast in one block";
constexpr const char* kWide = "rows this wide are faster in one block";
constexpr const char* kGeneral = "softcap, label smoothing and partials: cuda_block has them";
constexpr const char* kOneVisit = "without a gradient a row is visited once: cuda_block does that";
constexpr const char* kTooWide = "no cluster's shared memory holds two of these rows";
constexpr const char* kTooManyColumns = "more than 2^30 columns";
constexpr int64_t kMostColumns = 1 << 30;

// Rows whose vectors lie alike in logits and gradient, wherever they begin.
bool have_vectors(const Problem& problem) {
  const TensorView& logits = problem.logits;
  if (columns_of(logits) > 1 && logits.stride(-1) != 1) return false;
  if (!problem.grad_logits.is_present()) return true;
  const int64_t bytes = size_of(logits.dtype);
  const auto distance = static_cast<int64_t>(reinterpret_cast<uintptr_t>(logits.data)) -
                        static_cast<int64_t>(reinterpret_cast<uintptr_t>(problem.grad_logits.data));
  if (distance % kVectorBytes != 0) return false;
  for (int i = 0; i + 1 < logits.rank; ++i) {
    const int64_t apart = (logits.strides[i] - problem.grad_logits.strides[i]) * bytes;
    if (logits.sizes[i] > 1 && apart % kVectorBytes != 0) return false;
  }
  return true;
}

Arguments make_arguments(const Problem& problem) {
  const Options& options = problem.options;
  Arguments arguments{};
  arguments.shape = any_shape_of(problem.logits);
  arguments.logits = any_tensor_of(problem.logits);
  arguments.target = problem.target.data;
  arguments.target_is_wide = problem.target.dtype == DType::kInt64;
  arguments.weight = problem.weight.data;
  arguments.given_lse = problem.given_lse.as<const float>();
  arguments.grad_loss = problem.grad_loss.as<const float>();
  arguments.loss = problem.loss.as<float>();
  arguments.lse = problem.lse.as<float>();
  arguments.total = problem.total.as<float>();
  arguments.partials = problem.partials.as<float>();
  arguments.gradient = problem.grad_logits.data;
  arguments.grad_loss_step = problem.grad_loss.element_count() == 1 ? 0 : 1;
  arguments.ignore_index = options.ignore_index;
  arguments.vocabulary = options.vocabulary;
  arguments.first_column = options.first_column;
  arguments.label_smoothing = static_cast<float>(options.label_smoothing);
  arguments.share = static_cast<float>(options.label_smoothing / static_cast<double>(options.vocabulary));
  arguments.z_loss = static_cast<float>(options.z_loss);
  arguments.softcap = static_cast<float>(options.softcap);
  arguments.gradient_scale = static_cast<float>(problem.gradient_scale);
  arguments.is_mean = problem.reduction == Reduction::kMean;
  arguments.weight_is_float = problem.weight.dtype == DType::kFloat32;
  arguments.has_vectors = have_vectors(problem);
  return arguments;
}

DeviceCode block_code(std::string_view function, DType dtype, std::string_view more = "") {
  return {.source = kBlockSource,
          .entry = concat("kernel_pytorch::cross_entropy::", function, "<", element_type_name(dtype), more, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// Whether the mean's divisor is better counted once, by a kernel of its own, than by every block for itself: where the
// targets that all of them would read are more than the logits.
bool counts_first(const Problem& problem, int64_t blocks) {
  constexpr int64_t kFewRows = 4096;
  const int64_t rows = rows_of(problem.logits);
  return problem.reduction == Reduction::kMean && rows > kFewRows &&
         blocks * problem.target.byte_count() > problem.logits.byte_count();
}

// What a launch needs besides the arguments: that divisor, and a counter for the last block.
void prepare(const Problem& problem, int64_t blocks, Arguments& arguments, Context& context) {
  static const std::string kLabel = "cross_entropy count_rows";
  static KernelTable<std::size(kCudaTypes)> table;
  if (counts_first(problem, blocks)) {
    const DType dtype = problem.logits.dtype;
    CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return block_code("count_rows", dtype); });
    auto* counted = static_cast<double*>(context.scratch->allocate(sizeof(double)));
    cuda_device::LaunchShape shape;
    shape.block_x = kCountThreads;
    void* pointers[] = {&arguments, &counted};
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
    arguments.counted = counted;
  }
  if (arguments.total != nullptr) {
    arguments.arrived = static_cast<uint32_t*>(context.scratch->allocate(sizeof(uint32_t)));
    cuda_device::fill_bytes(context.info->device.index, arguments.arrived, 0, sizeof(uint32_t), context.stream);
  }
}

struct BlockConfig {
  int row_threads = 32;    // 32, or all threads of the block
  bool general = false;    // has the options that the lean kernels leave out
  int held_kilobytes = 0;  // of a row in shared memory, at most; L1 has the rest of it, and wants some
};
constexpr bool is_legal(const BlockConfig& config) {
  return config.row_threads >= 32 && config.row_threads <= 1024 && config.row_threads % 32 == 0 &&
         config.held_kilobytes >= 0;
}
constexpr auto kBlockConfigFields =
    config_fields<BlockConfig>(config_field<&BlockConfig::row_threads>(), config_field<&BlockConfig::general>(),
                               config_field<&BlockConfig::held_kilobytes>());
constexpr ConfigFields fields_of(const BlockConfig&) {
  return kBlockConfigFields;
}
// H200, 8192 rows of bf16, share of a copy.
constexpr BlockConfig kBlockConfigs[] = {
    {.row_threads = 32},
    {.row_threads = 256},
    {.row_threads = 1024},                         // 128256 columns: 77 %, 151936 columns: 74 %
    {.row_threads = 1024, .held_kilobytes = 64},   // 81 %, 78 %
    {.row_threads = 1024, .held_kilobytes = 112},  // 79 %, 82 %
    {.row_threads = 256, .general = true},
};
static_assert(are_legal(kBlockConfigs));
constexpr int kWideBlock = 2, kGeneralBlock = 5;
constexpr int kWarpRowBlock = 256;  // threads of a block whose warps each take a row

// With options that the lean kernels leave out.
bool is_general(const Problem& problem) {
  const Options& options = problem.options;
  return options.softcap != 0 || options.label_smoothing != 0 || problem.partials.is_present();
}

DeviceCode rows_code(const BlockConfig& config, DType dtype) {
  return block_code("block_rows", dtype, concat(", ", bool_name(config.general), ", ", config.row_threads));
}

registry::Support supports_block(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.logits.dtype, device)) return registry::Support::no(obstacle);
  return columns_of(problem.logits) > kMostColumns ? registry::Support::no(kTooManyColumns) : registry::Support::yes();
}
std::vector<std::string> block_configs(const Problem& problem, const DeviceInfo&) {
  if (is_general(problem)) return {config_text(kBlockConfigs[kGeneralBlock])};
  return config_texts(std::span(kBlockConfigs).first(kGeneralBlock));
}
// A wide row is held as far as L2 would not keep it: half of L2 serves a second visit. Without one, small blocks wait
// for each other least.
int block_heuristic(const Problem& problem, const DeviceInfo& device) {
  if (is_general(problem)) return 0;
  const int64_t bytes = columns_of(problem.logits) * size_of(problem.logits.dtype);
  if (bytes <= 32768 || !problem.grad_logits.is_present()) return bytes <= 2048 ? 0 : 1;
  const int64_t share = device.cuda.l2_bytes / 2 / std::max(device.cuda.multiprocessors, 1);
  int config = kWideBlock;
  while (config + 1 < kGeneralBlock && bytes - kBlockConfigs[config].held_kilobytes * 1024 > share) ++config;
  return config;
}

int32_t held_vectors(const Problem& problem, const BlockConfig& config, const DeviceInfo& device) {
  constexpr int64_t kStaticBytes = 4096;
  if (!problem.grad_logits.is_present()) return 0;
  const int64_t available =
      std::min<int64_t>(device.cuda.shared_bytes_per_block - kStaticBytes, config.held_kilobytes * 1024);
  const int64_t row = columns_of(problem.logits) * size_of(problem.logits.dtype) / kVectorBytes;
  return static_cast<int32_t>(std::min(std::max<int64_t>(available, 0) / kVectorBytes, row) / config.row_threads *
                              config.row_threads);
}

void run_block(const Problem& problem, int config, Context& context) {
  static const std::string kLabel = "cross_entropy block_rows";
  static KernelTable<std::size(kBlockConfigs) * std::size(kCudaTypes)> table;
  Arguments arguments = make_arguments(problem);
  if (arguments.shape.rows == 0 && arguments.total == nullptr) return;
  const DType dtype = problem.logits.dtype;
  const int position = is_general(problem) ? kGeneralBlock : config;
  const int row_threads = kBlockConfigs[position].row_threads;
  const int threads = row_threads == 32 ? kWarpRowBlock : row_threads;
  CUkern_st* kernel = table.get(position * static_cast<int>(std::size(kCudaTypes)) + cuda_type_index(dtype), context,
                                [&] { return rows_code(kBlockConfigs[position], dtype); });
  const int64_t resident =
      static_cast<int64_t>(std::max(context.info->cuda.multiprocessors, 1)) * (kThreadsOnMultiprocessor / threads);
  const int64_t blocks = std::clamp<int64_t>(divide_up(arguments.shape.rows, threads / row_threads), 1, resident);
  prepare(problem, blocks, arguments, context);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(threads);
  arguments.held_vectors = held_vectors(problem, kBlockConfigs[position], *context.info);
  shape.shared_bytes = static_cast<unsigned>(arguments.held_vectors * kVectorBytes);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> block_codes() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (const BlockConfig& config : kBlockConfigs) codes.push_back(rows_code(config, dtype));
    codes.push_back(block_code("count_rows", dtype));
  }
  return codes;
}

struct ClusterLaunch {
  ClusterConfig config;
  int cluster = 2;  // blocks that share a row
};
constexpr bool is_legal(const ClusterLaunch& launch) {
  return is_legal(launch.config) && launch.cluster >= 2 && launch.cluster <= 16;
}
constexpr auto kClusterLaunchFields =
    config_fields<ClusterLaunch>(config_field<&ClusterLaunch::config>(), config_field<&ClusterLaunch::cluster>());
constexpr ConfigFields fields_of(const ClusterLaunch&) {
  return kClusterLaunchFields;
}
// More than two blocks wait for each other too long (H200, 8192x50304 bf16: 81 % of a copy with two, 46 % with four).
constexpr ClusterLaunch kClusterLaunches[] = {
    {.config = {.consumers = 512, .blocks = 2}, .cluster = 2},  // 8192x32000: 79 %, 72 % in a block
};
static_assert(are_legal(kClusterLaunches));
constexpr int kClusterLaunchCount = static_cast<int>(std::size(kClusterLaunches));
// Vectors of a row: 16384 to 50000 bf16.
constexpr int64_t kLeastVectors = 2048;
constexpr int64_t kMostVectors = 8192;
// Shared memory that the driver keeps for itself per block, and what the kernel declares statically, rounded up.
constexpr int64_t kOwnBytes = 1024 + 13 * 1024;
// Clusters live inside a graphics processing cluster, which has 16 to 18 multiprocessors on an H100 or H200.
constexpr int64_t kMultiprocessorsPerGroup = 16;

int64_t row_vectors(const Problem& problem) {
  return columns_of(problem.logits) * size_of(problem.logits.dtype) / kVectorBytes;
}

int64_t stage_count(const ClusterLaunch& launch, int64_t vectors, const DeviceInfo& device) {
  const int64_t share = device.cuda.shared_bytes_per_multiprocessor / launch.config.blocks;
  const int64_t available = std::min(share, device.cuda.shared_bytes_per_block + 1024) - kOwnBytes;
  return std::min<int64_t>(kMaxStages, available / (divide_up(vectors, launch.cluster) * kVectorBytes));
}

bool fits(const ClusterLaunch& launch, const Problem& problem, const DeviceInfo& device) {
  const int64_t slice = divide_up(row_vectors(problem), launch.cluster);
  return slice >= launch.config.consumers && stage_count(launch, row_vectors(problem), device) >= 2;
}

const char* cluster_obstacle(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.logits.dtype, device)) return obstacle;
  if (const char* missing = feature_obstacle(device, CudaFeature::kCluster)) return missing;
  if (const char* obstacle = vector_access_obstacle(problem.logits)) return obstacle;
  if (const char* obstacle = vector_access_obstacle(problem.grad_logits)) return obstacle;
  if (is_general(problem)) return kGeneral;
  if (!problem.grad_logits.is_present()) return kOneVisit;
  if (row_vectors(problem) < kLeastVectors) return kNarrow;
  if (row_vectors(problem) > kMostVectors) return kWide;
  for (const ClusterLaunch& launch : kClusterLaunches) {
    if (fits(launch, problem, device)) return nullptr;
  }
  return kTooWide;
}

registry::Support supports_cluster(const Problem& problem, const DeviceInfo& device) {
  const char* obstacle = cluster_obstacle(problem, device);
  return registry::Support::unless(obstacle);
}

std::vector<std::string> cluster_configs(const Problem& problem, const DeviceInfo& device) {
  std::vector<std::string> texts;
  for (const ClusterLaunch& launch : kClusterLaunches) {
    if (fits(launch, problem, device)) texts.push_back(config_text(launch));
  }
  return texts;
}

DeviceCode cluster_code(const ClusterConfig& config, DType dtype) {
  return {.source = kClusterSource,
          .entry = concat("kernel_pytorch::cross_entropy::cluster_rows<", element_type_name(dtype), ", ",
                          device_text(config), ">"),
          .minimum_capability = 90,
          .architecture_specific = false};
}

void run_cluster(const Problem& problem, int config, Context& context) {
  static const std::string kLabel = "cross_entropy cluster_rows";
  static KernelTable<kClusterLaunchCount * std::size(kCudaTypes)> table;
  const DeviceInfo& device = *context.info;
  int position = 0;
  for (; position < kClusterLaunchCount; ++position) {
    if (fits(kClusterLaunches[position], problem, device) && config-- == 0) break;
  }
  KP_INTERNAL_CHECK(position < kClusterLaunchCount, "cross_entropy: a config index beyond the legal ones");
  const ClusterLaunch& launch = kClusterLaunches[position];
  const DType dtype = problem.logits.dtype;
  CUkern_st* kernel = table.get(position * static_cast<int>(std::size(kCudaTypes)) + cuda_type_index(dtype), context,
                                [&] { return cluster_code(launch.config, dtype); });
  Arguments arguments = make_arguments(problem);
  arguments.slice_vectors = static_cast<int32_t>(divide_up(row_vectors(problem), launch.cluster));
  arguments.stages = static_cast<int32_t>(stage_count(launch, row_vectors(problem), device));
  const int64_t groups = std::max<int64_t>(device.cuda.multiprocessors / kMultiprocessorsPerGroup, 1);
  const int64_t resident =
      std::max<int64_t>(groups * (kMultiprocessorsPerGroup * launch.config.blocks / launch.cluster), 1);
  const int64_t rounds = divide_up(std::max<int64_t>(arguments.shape.rows, 1), resident);
  const int64_t units = divide_up(std::max<int64_t>(arguments.shape.rows, 1), rounds);
  prepare(problem, units * launch.cluster, arguments, context);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(units * launch.cluster);
  shape.block_x = static_cast<unsigned>(launch.config.consumers + kFetchThreads);
  shape.cluster_x = static_cast<unsigned>(launch.cluster);
  shape.shared_bytes = static_cast<unsigned>(arguments.stages * arguments.slice_vectors * kVectorBytes);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> cluster_codes() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) codes.push_back(cluster_code(kClusterLaunches[0].config, dtype));
  return codes;
}

registry::Support supports_rescale(const RescaleProblem& problem, const DeviceInfo& device) {
  const char* obstacle = cuda_obstacle(problem.tensor.dtype, device);
  return registry::Support::unless(obstacle);
}

void run_rescale(const RescaleProblem& problem, int, Context& context) {
  static const std::string kLabel = "cross_entropy rescale";
  static KernelTable<std::size(kCudaTypes)> table;
  const int64_t elements = problem.tensor.element_count();
  if (elements == 0) return;
  const DType dtype = problem.tensor.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return block_code("rescale", dtype); });
  RescaleArguments arguments{
      .tensor = problem.tensor.data, .elements = elements, .scale = problem.scale.as<const float>()};
  const int64_t per_block = kRescaleThreads * kRescaleVectors * kVectorBytes / size_of(dtype);
  const int64_t resident = static_cast<int64_t>(std::max(context.info->cuda.multiprocessors, 1)) * 4;
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min(divide_up(elements, per_block), resident));
  shape.block_x = kRescaleThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> rescale_codes() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) codes.push_back(block_code("rescale", dtype));
  return codes;
}

uint64_t block_hash() {
  return jit::source_hash(kBlockSource);
}
uint64_t cluster_hash() {
  return jit::source_hash(kClusterSource);
}

}  // namespace

constinit const registry::Kernel<Problem> kCudaCluster{.name = "cuda_cluster",
                                                       .origin = registry::Origin::kOurs,
                                                       .supports = supports_cluster,
                                                       .configs = cluster_configs,
                                                       .heuristic = nullptr,
                                                       .run = run_cluster,
                                                       .source_hash = cluster_hash,
                                                       .device_code = cluster_codes};
constinit const registry::Kernel<Problem> kCudaBlock{.name = "cuda_block",
                                                     .origin = registry::Origin::kOurs,
                                                     .supports = supports_block,
                                                     .configs = block_configs,
                                                     .heuristic = block_heuristic,
                                                     .run = run_block,
                                                     .source_hash = block_hash,
                                                     .device_code = block_codes};
constinit const registry::Kernel<RescaleProblem> kRescaleCuda{.name = "cuda",
                                                              .origin = registry::Origin::kOurs,
                                                              .supports = supports_rescale,
                                                              .run = run_rescale,
                                                              .source_hash = block_hash,
                                                              .device_code = rescale_codes};

}  // namespace kernel_pytorch::cross_entropy
