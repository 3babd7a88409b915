// Host side of softmax for any strides: the last resort on a GPU, so it refuses nothing but other element types.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::softmax {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/softmax/cuda/any.cuh";
constexpr RowThreads kRowThreads[] = {{.row_threads = 32}, {.row_threads = 512}};
constexpr int kWarpRowBlock = 256;  // threads of a block whose warps each take a row
constexpr int64_t kWarpColumns = 512;

DeviceCode code_of(std::string_view function, DType dtype, int row_threads) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::softmax::", function, "<", element_type_name(dtype), ", ", row_threads, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

template <class Problem>
const TensorView& main_of(const Problem& problem) {
  if constexpr (std::is_same_v<Problem, ForwardProblem>) {
    return problem.x;
  } else {
    return problem.output;
  }
}

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(main_of(problem).dtype, device));
}

template <class Problem>
std::vector<std::string> configs(const Problem&, const DeviceInfo&) {
  return config_texts(kRowThreads);
}

template <class Problem>
int heuristic(const Problem& problem, const DeviceInfo&) {
  return columns_of(main_of(problem)) <= kWarpColumns ? 0 : 1;
}

AnyForwardArguments make_arguments(const ForwardProblem& problem) {
  AnyForwardArguments arguments{.shape = any_shape_of(problem.x),
                                .x = any_tensor_of(problem.x),
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
AnyBackwardArguments make_arguments(const BackwardProblem& problem) {
  return {.shape = any_shape_of(problem.output),
          .grad_output = any_tensor_of(problem.grad_output),
          .output = any_tensor_of(problem.output),
          .grad_input = problem.grad_input.data,
          .scale = static_cast<float>(problem.scale),
          .log = problem.log,
          .masked = problem.masked};
}

constexpr std::string_view function_of(const ForwardProblem*) {
  return "forward_any";
}
constexpr std::string_view function_of(const BackwardProblem*) {
  return "backward_any";
}

cuda_device::LaunchShape launch_shape(int row_threads, int64_t rows, const DeviceInfo& device) {
  const int threads = row_threads == 32 ? kWarpRowBlock : row_threads;
  const int64_t rows_per_block = threads / row_threads;
  const int64_t resident = static_cast<int64_t>(std::max(device.cuda.multiprocessors, 1)) * (2048 / threads);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min((rows + rows_per_block - 1) / rows_per_block, 4 * resident));
  shape.block_x = static_cast<unsigned>(threads);
  return shape;
}

template <class Problem>
void run(const Problem& problem, int config, Context& context) {
  static const std::string kLabel = "softmax any";
  static KernelTable<std::size(kRowThreads) * std::size(kCudaTypes)> table;
  const TensorView& main = main_of(problem);
  if (main.element_count() == 0) return;
  CUkern_st* kernel =
      table.get(config * static_cast<int>(std::size(kCudaTypes)) + cuda_type_index(main.dtype), context,
                [&] { return code_of(function_of(&problem), main.dtype, kRowThreads[config].row_threads); });
  auto arguments = make_arguments(problem);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel,
                      launch_shape(kRowThreads[config].row_threads, arguments.shape.rows, *context.info), pointers,
                      kLabel);
}

template <class Problem>
std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (const RowThreads& config : kRowThreads) {
      codes.push_back(code_of(function_of(static_cast<const Problem*>(nullptr)), dtype, config.row_threads));
    }
  }
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

template <class Problem>
constexpr registry::Kernel<Problem> make_kernel() {
  return {.name = "cuda_any",
          .origin = registry::Origin::kOurs,
          .supports = supports<Problem>,
          .configs = configs<Problem>,
          .heuristic = heuristic<Problem>,
          .run = run<Problem>,
          .source_hash = source_hash,
          .device_code = device_code<Problem>};
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaAny = make_kernel<ForwardProblem>();
constinit const registry::Kernel<BackwardProblem> kBackwardCudaAny = make_kernel<BackwardProblem>();

}  // namespace kernel_pytorch::softmax
