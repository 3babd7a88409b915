// The CUDA kernels that hold a row in registers: cuda_rows (a row within a block) and cuda_cluster (a row over the
// blocks of a cluster) are lists of configs of the device functions in softmax_cuda.cuh.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/any_rows.h"
#include "kernel_pytorch/ops/cuda_support.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/softmax/softmax_cuda.h"

namespace kernel_pytorch::softmax {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/softmax/softmax_cuda.cuh";
constexpr const char* kTooWide = "the row does not fit this kernel's registers";
constexpr const char* kMaskNotVectors = "the mask's rows cannot be read as vectors: strided columns or misaligned";

struct LaunchConfig {
  RowConfig rows;
  int cluster = 1;
  bool masks = true;        // the registers can hold scores with a mask added
  bool any_width = false;   // taken however little of it the row fills
  bool float_only = false;  // wider than any row of a 16-bit type that the op promises
};

// Ascending in capacity; the first that holds the row is the one preferred.
constexpr LaunchConfig kForwardConfigs[] = {
    {{128, 8, 2, 8, false}, 1, false, true},
    {{128, 32, 4, 8, false}, 1, true, true},
    {{128, 128, 4, 8, false}},
    {{256, 256, 2, 4, false}, 1, false},
    {{256, 256, 4, 4, false}},
    {{512, 512, 4, 2, false}},
    {{1024, 1024, 4, 1, false}, 1, false},
};
constexpr LaunchConfig kBackwardConfigs[] = {
    {{128, 8, 2, 8, false}, 1, true, true},
    {{128, 32, 2, 8, false}},
    {{256, 256, 2, 4, false}},
    {{512, 512, 2, 2, false}},
    {{1024, 1024, 2, 1, false}},
};
constexpr LaunchConfig kForwardClusters[] = {
    {{512, 512, 4, 2, true}, 2},
    {{512, 512, 4, 2, true}, 4},
    {{512, 512, 4, 2, true}, 8},
    {{512, 512, 4, 2, true}, 16},
    {{512, 512, 8, 1, true}, 16, true, false, true},
};
constexpr LaunchConfig kBackwardClusters[] = {
    {{512, 512, 4, 1, true}, 2},
    {{512, 512, 4, 1, true}, 4},
    {{512, 512, 4, 1, true}, 8},
    {{512, 512, 4, 1, true}, 16},
    {{512, 512, 8, 1, true}, 16, true, false, true},
};

struct Work {
  int64_t rows, columns;
  DType dtype;
  bool masked;
  int64_t row_vectors() const { return columns * size_of(dtype) / kVectorBytes; }
};

// Whether the row fits, and fills more than a quarter of the threads' registers.
bool fits(const LaunchConfig& config, const Work& work, const DeviceInfo& device) {
  if (device.cuda.capability() < (config.rows.clustered ? 90 : 80)) return false;
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
std::vector<std::string> config_texts(const Work& work, const DeviceInfo& device) {
  std::vector<std::string> texts;
  for (int i = 0; i < static_cast<int>(std::size(kConfigs)); ++i) {
    const RowConfig& rows = kConfigs[i].rows;
    if (!fits(kConfigs[i], work, device)) continue;
    texts.push_back(concat("threads=", rows.threads, " row_threads=", rows.row_threads, " vectors=", rows.vectors,
                           " blocks=", rows.blocks,
                           rows.clustered ? concat(" cluster=", kConfigs[i].cluster) : std::string()));
  }
  return texts;
}

DeviceCode code_of(std::string_view function, std::string_view arguments, const RowConfig& rows) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::softmax::", function, "<", arguments,
                          ", kernel_pytorch::softmax::RowConfig{", rows.threads, ", ", rows.row_threads, ", ",
                          rows.vectors, ", ", rows.blocks, ", ", bool_name(rows.clustered), "}>"),
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
                             .mask_kind = problem.mask_kind(),
                             .causal = problem.causal,
                             .log = problem.log,
                             .empty_is_zero = problem.removes_scores()};
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

// What is compiled beside the config: the element type, and for forward whether there is a mask.
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
    if (kConfigs[0].rows.clustered && device.cuda.capability() < 90) return registry::Support::no(kNeedsHopper);
    const Work work = work_of(problem);
    for (const LaunchConfig& config : kConfigs) {
      if (fits(config, work, device)) return registry::Support::yes();
    }
    return registry::Support::no(kTooWide);
  }
  static std::vector<std::string> configs(const Problem& problem, const DeviceInfo& device) {
    return config_texts<kConfigs>(work_of(problem), device);
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
