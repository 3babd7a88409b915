// The CUDA kernels that hold a row in registers: cuda_rows (a row within a block) and cuda_cluster (a row over the
// blocks of a cluster) are lists of configs of the device functions in softmax/cuda/kernel.cuh.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::softmax {
constexpr auto kRowConfigFields = config_fields<RowConfig>(
    config_field<&RowConfig::threads>(), config_field<&RowConfig::row_threads>(), config_field<&RowConfig::vectors>(),
    config_field<&RowConfig::blocks>(), config_field<&RowConfig::clustered>());
constexpr ConfigFields fields_of(const RowConfig&) {
  return kRowConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/softmax/cuda/kernel.cuh";
constexpr const char* kTooWide = "the row does not fit this kernel's registers";
constexpr const char* kMaskNotVectors = "the mask's rows cannot be read as vectors: strided columns or misaligned";

struct LaunchConfig {
  RowConfig rows;
  int cluster = 1;
  // Limits.
  bool masks = true;        // the registers can hold scores with a mask added
  bool any_width = false;   // taken however little of it the row fills
  bool float_only = false;  // wider than any row of a 16-bit type that the op promises
};

constexpr bool is_legal(const LaunchConfig& config) {
  return is_legal(config.rows) && (config.cluster > 1) == config.rows.clustered && config.cluster <= 16;
}

constexpr auto kLaunchConfigFields = config_fields<LaunchConfig>(
    config_field<&LaunchConfig::rows>(), config_field<&LaunchConfig::cluster>(), config_limit<&LaunchConfig::masks>(),
    config_limit<&LaunchConfig::any_width>(), config_limit<&LaunchConfig::float_only>());
constexpr ConfigFields fields_of(const LaunchConfig&) {
  return kLaunchConfigFields;
}

// clang-format off
// Ascending in capacity; the first that holds the row is the one preferred.
constexpr LaunchConfig kForwardConfigs[] = {
    {.rows = {.threads = 128, .row_threads = 8, .vectors = 2, .blocks = 8}, .masks = false, .any_width = true},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 4, .blocks = 8}, .any_width = true},
    {.rows = {.threads = 128, .row_threads = 128, .vectors = 4, .blocks = 8}},
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .blocks = 4}, .masks = false},
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 4, .blocks = 4}},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2}},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 4, .blocks = 1}, .masks = false},
};
static_assert(are_legal(kForwardConfigs));
constexpr LaunchConfig kBackwardConfigs[] = {
    {.rows = {.threads = 128, .row_threads = 8, .vectors = 2, .blocks = 8}, .any_width = true},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 2, .blocks = 8}},
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .blocks = 4}},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 2, .blocks = 2}},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 2, .blocks = 1}},
};
static_assert(are_legal(kBackwardConfigs));
constexpr LaunchConfig kForwardClusters[] = {
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2, .clustered = true}, .cluster = 2},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2, .clustered = true}, .cluster = 4},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2, .clustered = true}, .cluster = 8},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2, .clustered = true}, .cluster = 16},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 8, .blocks = 1, .clustered = true}, .cluster = 16, .float_only = true},
};
static_assert(are_legal(kForwardClusters));
constexpr LaunchConfig kBackwardClusters[] = {
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 1, .clustered = true}, .cluster = 2},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 1, .clustered = true}, .cluster = 4},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 1, .clustered = true}, .cluster = 8},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 1, .clustered = true}, .cluster = 16},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 8, .blocks = 1, .clustered = true}, .cluster = 16, .float_only = true},
};
static_assert(are_legal(kBackwardClusters));
// clang-format on

struct Work {
  int64_t rows, columns;
  DType dtype;
  bool masked;
  int64_t row_vectors() const { return columns * size_of(dtype) / kVectorBytes; }
};

// Whether the row fits, and fills more than a quarter of the threads' registers.
bool fits(const LaunchConfig& config, const Work& work, const DeviceInfo& device) {
  if (!has_feature(device, config.rows.clustered ? CudaFeature::kCluster : CudaFeature::kMma)) return false;
  if (config.cluster > most_cluster_blocks(device)) return false;
  if ((work.masked && !config.masks) || (config.float_only && work.dtype != DType::kFloat32)) return false;
  const int64_t slice = divide_up(work.row_vectors(), config.cluster);
  const int64_t capacity = static_cast<int64_t>(config.rows.row_threads) * config.rows.vectors;
  return slice <= capacity && (slice * 4 > capacity || config.any_width);
}

template <const auto& kConfigs>
int position_of(int legal_index, const Work& work, const DeviceInfo& device) {
  for (int i = 0; i < static_cast<int>(std::size(kConfigs)); ++i) {
    if (fits(kConfigs[i], work, device) && legal_index-- == 0) return i;
  }
  fail(ErrorCode::kInternal, "softmax: a config index beyond the legal ones for [", work.rows, ", ", work.columns, "]");
}

template <const auto& kConfigs>
std::vector<std::string> fitting_configs(const Work& work, const DeviceInfo& device) {
  std::vector<std::string> texts;
  for (const LaunchConfig& config : kConfigs) {
    if (fits(config, work, device)) texts.push_back(config_text(config));
  }
  return texts;
}

DeviceCode code_of(std::string_view function, std::string_view arguments, const RowConfig& rows) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::softmax::", function, "<", arguments, ", ", device_text(rows), ">"),
          .minimum_capability = rows.clustered ? 90 : 80,
          .architecture_specific = false};
}
DeviceCode forward_code(const RowConfig& rows, DType dtype, bool masked) {
  return code_of("forward_rows", concat(element_type_name(dtype), ", ", bool_name(masked)), rows);
}
DeviceCode backward_code(const RowConfig& rows, DType dtype) {
  return code_of("backward_rows", element_type_name(dtype), rows);
}

cuda_device::LaunchShape launch_shape(const LaunchConfig& config, int64_t rows) {
  constexpr int64_t kMaxGrid = 0x7fffffff;
  const int64_t units = divide_up(rows, config.rows.threads / config.rows.row_threads);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min(units, kMaxGrid / config.cluster) * config.cluster);
  shape.block_x = static_cast<unsigned>(config.rows.threads);
  shape.cluster_x = static_cast<unsigned>(config.cluster);
  return shape;
}

RowShape row_shape(const LaunchConfig& config, const Work& work) {
  return {.rows = work.rows,
          .columns = static_cast<int32_t>(work.columns),
          .slice_vectors = static_cast<int32_t>(divide_up(work.row_vectors(), config.cluster))};
}

RowTensor row_tensor(const TensorView& view) {
  return {view.data, view.strides[0] * size_of(view.dtype)};
}

// A vector of x covers as many mask elements, read with one or two loads of their whole size.
const char* mask_obstacle(const ForwardProblem& problem) {
  const TensorView& mask = problem.mask;
  if (!mask.is_present()) return nullptr;
  if (mask.stride(-1) != 1 && columns_of(mask) > 1) return kMaskNotVectors;
  const int64_t bytes = std::min(kVectorBytes / size_of(problem.x.dtype) * size_of(mask.dtype), kVectorBytes);
  return has_aligned_rows(mask, bytes) ? nullptr : kMaskNotVectors;
}

Work work_of(const ForwardProblem& problem) {
  return {rows_of(problem.x), columns_of(problem.x), problem.x.dtype, problem.mask.is_present()};
}
Work work_of(const BackwardProblem& problem) {
  return {rows_of(problem.output), columns_of(problem.output), problem.output.dtype, false};
}
const char* obstacle_of(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  if (const char* obstacle = vector_access_obstacle(problem.x)) return obstacle;
  if (const char* obstacle = vector_access_obstacle(problem.output)) return obstacle;
  return mask_obstacle(problem);
}
const char* obstacle_of(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.output.dtype, device)) return obstacle;
  for (const TensorView* view : {&problem.output, &problem.grad_output, &problem.grad_input}) {
    if (const char* obstacle = vector_access_obstacle(*view)) return obstacle;
  }
  return nullptr;
}

ForwardArguments make_arguments(const ForwardProblem& problem, const RowShape& shape) {
  ForwardArguments arguments{.shape = shape,
                             .x = row_tensor(problem.x),
                             .output = problem.output.data,
                             .mask_shape = {},
                             .mask = any_tensor_of(problem.mask),
                             .queries = problem.queries,
                             .scale = static_cast<float>(problem.scale),
                             .mask_kind = mask_kind_of(problem),
                             .causal = problem.causal,
                             .log = problem.log,
                             .empty_is_zero = removes_scores(problem)};
  if (problem.mask.is_present()) arguments.mask_shape = any_shape_of(problem.mask);
  return arguments;
}
BackwardArguments make_arguments(const BackwardProblem& problem, const RowShape& shape) {
  return {.shape = shape,
          .grad_output = row_tensor(problem.grad_output),
          .output = row_tensor(problem.output),
          .grad_input = problem.grad_input.data,
          .scale = static_cast<float>(problem.scale),
          .log = problem.log,
          .masked = problem.masked};
}

// Template arguments besides the config: the element type, and for forward whether there is a mask.
DeviceCode code_for(const ForwardProblem& problem, const RowConfig& rows) {
  return forward_code(rows, problem.x.dtype, problem.mask.is_present());
}
DeviceCode code_for(const BackwardProblem& problem, const RowConfig& rows) {
  return backward_code(rows, problem.output.dtype);
}
int variant_of(const ForwardProblem& problem) {
  return cuda_type_index(problem.x.dtype) * 2 + problem.mask.is_present();
}
int variant_of(const BackwardProblem& problem) {
  return cuda_type_index(problem.output.dtype) * 2;
}
constexpr int kVariants = 6;

std::vector<DeviceCode> codes_for(const LaunchConfig& config, DType dtype, const ForwardProblem*) {
  std::vector<DeviceCode> codes{forward_code(config.rows, dtype, false)};
  if (config.masks) codes.push_back(forward_code(config.rows, dtype, true));
  return codes;
}
std::vector<DeviceCode> codes_for(const LaunchConfig& config, DType dtype, const BackwardProblem*) {
  return {backward_code(config.rows, dtype)};
}

// The functions of a registry row for one list of configs.
template <class Problem, const auto& kConfigs>
struct Rows {
  static registry::Support supports(const Problem& problem, const DeviceInfo& device) {
    if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
    const char* missing = feature_obstacle(device, CudaFeature::kCluster);
    if (kConfigs[0].rows.clustered && missing != nullptr) return registry::Support::no(missing);
    const Work work = work_of(problem);
    for (const LaunchConfig& config : kConfigs) {
      if (fits(config, work, device)) return registry::Support::yes();
    }
    return registry::Support::no(kTooWide);
  }
  static std::vector<std::string> configs(const Problem& problem, const DeviceInfo& device) {
    return fitting_configs<kConfigs>(work_of(problem), device);
  }
  static void run(const Problem& problem, int config, Context& context) {
    static const std::string kLabel = "softmax rows";
    static KernelTable<std::size(kConfigs) * kVariants> table;
    const Work work = work_of(problem);
    if (work.rows == 0 || work.columns == 0) return;
    const int position = position_of<kConfigs>(config, work, *context.info);
    const LaunchConfig& chosen = kConfigs[position];
    CUkern_st* kernel =
        table.get(position * kVariants + variant_of(problem), context, [&] { return code_for(problem, chosen.rows); });
    auto arguments = make_arguments(problem, row_shape(chosen, work));
    void* pointers[] = {&arguments};
    cuda_device::launch(context, kernel, launch_shape(chosen, work.rows), pointers, kLabel);
  }
  static uint64_t source_hash() { return jit::source_hash(kSource); }
  static std::vector<DeviceCode> device_code() {
    std::vector<DeviceCode> unique;
    for (const LaunchConfig& config : kConfigs) {
      for (DType dtype : kCudaTypes) {
        if (config.float_only && dtype != DType::kFloat32) continue;
        for (DeviceCode& code : codes_for(config, dtype, static_cast<const Problem*>(nullptr))) {
          if (std::find(unique.begin(), unique.end(), code) == unique.end()) unique.push_back(std::move(code));
        }
      }
    }
    return unique;
  }
  static constexpr registry::Kernel<Problem> kernel(std::string_view name) {
    return {.name = name,
            .origin = registry::Origin::kOurs,
            .supports = supports,
            .configs = configs,
            .heuristic = nullptr,
            .run = run,
            .source_hash = source_hash,
            .device_code = device_code};
  }
};

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaRows =
    Rows<ForwardProblem, kForwardConfigs>::kernel("cuda_rows");
constinit const registry::Kernel<ForwardProblem> kForwardCudaCluster =
    Rows<ForwardProblem, kForwardClusters>::kernel("cuda_cluster");
constinit const registry::Kernel<BackwardProblem> kBackwardCudaRows =
    Rows<BackwardProblem, kBackwardConfigs>::kernel("cuda_rows");
constinit const registry::Kernel<BackwardProblem> kBackwardCudaCluster =
    Rows<BackwardProblem, kBackwardClusters>::kernel("cuda_cluster");

}  // namespace kernel_pytorch::softmax
