// Host side of the row norms for any strides: the last resort on a GPU, so it refuses nothing but other element types.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/row_norm/cuda/any_cuda.h"
#include "kernel_pytorch/ops/engines/row_norm/cuda/launch.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/column_sums.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/engines/row_norm/cuda/any.cuh";
constexpr RowThreads kRowThreads[] = {{.row_threads = 32}, {.row_threads = 256}, {.row_threads = 1024}};
constexpr int kWarpRowBlock = 256;  // threads of a block whose warps each take a row

DeviceCode code_of(std::string_view function, DType dtype, int row_threads, bool activated = false) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::row_norm::", function, "<", element_type_name(dtype),
                          row_threads == 0 ? "" : concat(", ", row_threads), activated ? ", true>" : ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  const char* obstacle = cuda_obstacle(problem.x.dtype, device);
  return registry::Support::unless(obstacle);
}
registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  const char* obstacle = cuda_obstacle(problem.value.dtype, device);
  return registry::Support::unless(obstacle);
}

std::vector<std::string> forward_configs(const ForwardProblem&, const DeviceInfo&) {
  return config_texts(kRowThreads);
}
std::vector<std::string> backward_configs(const BackwardProblem&, const DeviceInfo&) {
  return config_texts(kRowThreads);
}

// About sixteen elements per thread, so that a pass over the row amortises its sum.
int preferred_config(int64_t columns) {
  return columns <= 512 ? 0 : columns <= 16384 ? 1 : 2;
}
int forward_heuristic(const ForwardProblem& problem, const DeviceInfo&) {
  return preferred_config(columns_of(problem.x));
}
int backward_heuristic(const BackwardProblem& problem, const DeviceInfo&) {
  return preferred_config(columns_of(problem.value));
}

cuda_device::LaunchShape rows_shape(int row_threads, int64_t rows, const DeviceInfo& device) {
  const int threads = row_threads == 32 ? kWarpRowBlock : row_threads;
  const int64_t rows_per_block = threads / row_threads;
  const int64_t resident = static_cast<int64_t>(std::max(device.cuda.multiprocessors, 1)) * (2048 / threads);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min((rows + rows_per_block - 1) / rows_per_block, 4 * resident));
  shape.block_x = static_cast<unsigned>(threads);
  return shape;
}

void run_forward(const ForwardProblem& problem, int config, Context& context) {
  static const std::string kLabel = "row_norm forward_any";
  static KernelTable<2 * std::size(kRowThreads) * std::size(kCudaTypes)> table;
  if (problem.x.element_count() == 0) return;
  const DType dtype = problem.x.dtype;
  const int row_threads = kRowThreads[config].row_threads;
  const bool activated = problem.activation != Activation::kIdentity;
  CUkern_st* kernel = table.get((config * std::size(kCudaTypes) + cuda_type_index(dtype)) * 2 + activated, context,
                                [&] { return code_of("forward_any", dtype, row_threads, activated); });
  AnyForwardArguments arguments{
      .shape = any_shape_of(problem.x),
      .x = any_tensor_of(problem.x),
      .residual = any_tensor_of(problem.residual),
      .weight = any_tensor_of(problem.weight),
      .bias = any_tensor_of(problem.bias),
      .output = problem.output.data,
      .sum = problem.sum.data,
      .mean = problem.mean.as<float>(),
      .rstd = problem.rstd.as<float>(),
      .eps = static_cast<float>(*problem.eps),
      .weight_offset = static_cast<float>(problem.weight_offset),
      .centered = problem.norm == Norm::kLayer,
      .weight_is_float = (problem.weight.is_present() ? problem.weight : problem.bias).dtype == DType::kFloat32,
      .residual_type = mixed_type(dtype, problem.residual),
      .output_type = mixed_type(dtype, problem.output),
      .activation = problem.activation};
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, rows_shape(row_threads, arguments.shape.rows, *context.info), pointers, kLabel);
}

void run_input_gradient(const BackwardProblem& problem, int config, Context& context) {
  static const std::string kLabel = "row_norm backward_any";
  static KernelTable<std::size(kRowThreads) * std::size(kCudaTypes)> table;
  const DType dtype = problem.value.dtype;
  const int row_threads = kRowThreads[config].row_threads;
  CUkern_st* kernel = table.get(config * std::size(kCudaTypes) + cuda_type_index(dtype), context,
                                [&] { return code_of("backward_any", dtype, row_threads); });
  AnyBackwardArguments arguments{.shape = any_shape_of(problem.value),
                                 .grad_output = any_tensor_of(problem.grad_output),
                                 .value = any_tensor_of(problem.value),
                                 .grad_sum = any_tensor_of(problem.grad_sum),
                                 .weight = any_tensor_of(problem.weight),
                                 .mean = problem.mean.as<float>(),
                                 .rstd = problem.rstd.as<float>(),
                                 .grad_input = problem.grad_input.data,
                                 .weight_offset = static_cast<float>(problem.weight_offset),
                                 .centered = problem.norm == Norm::kLayer,
                                 .weight_is_float = problem.weight.dtype == DType::kFloat32,
                                 .grad_output_type = mixed_type(dtype, problem.grad_output)};
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, rows_shape(row_threads, arguments.shape.rows, *context.info), pointers, kLabel);
}

void run_parameter_gradients(const BackwardProblem& problem, Context& context) {
  static const std::string kLabel = "row_norm sum_columns_any";
  static KernelTable<std::size(kCudaTypes)> table;
  const DType dtype = problem.value.dtype;
  const int64_t rows = rows_of(problem.value), columns = columns_of(problem.value);
  const int64_t strips = (columns + kColumnSumColumns - 1) / kColumnSumColumns;
  // Enough chunks of rows to fill the device eight blocks deep, each long enough to be worth a partial row.
  const int64_t wanted = std::clamp<int64_t>(8 * context.info->cuda.multiprocessors / strips, 1, 512);
  const int64_t rows_per_chunk = std::max((rows + wanted - 1) / wanted, int64_t{4 * kColumnSumRows});
  const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
  const ColumnSums sums = allocate_column_sums(problem.grad_weight, problem.grad_bias, columns, chunks, context);
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return code_of("sum_columns_any", dtype, 0); });
  AnyColumnSumArguments arguments{.shape = any_shape_of(problem.value),
                                  .grad_output = any_tensor_of(problem.grad_output),
                                  .value = any_tensor_of(problem.value),
                                  .mean = problem.mean.as<float>(),
                                  .rstd = problem.rstd.as<float>(),
                                  .weight_partial = sums.partials[0],
                                  .bias_partial = sums.partials[1],
                                  .rows_per_chunk = rows_per_chunk,
                                  .centered = problem.norm == Norm::kLayer,
                                  .grad_output_type = mixed_type(dtype, problem.grad_output)};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(strips);
  shape.grid_y = static_cast<unsigned>(chunks);
  shape.block_x = kColumnSumColumns * kColumnSumRows;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  add_column_sums(sums, context);
}

void run_backward(const BackwardProblem& problem, int config, Context& context) {
  if (problem.value.element_count() == 0) return zero_column_sums(problem.grad_weight, problem.grad_bias, context);
  if (problem.grad_input.is_present()) run_input_gradient(problem, config, context);
  if (problem.grad_weight.is_present() || problem.grad_bias.is_present()) run_parameter_gradients(problem, context);
}

uint64_t forward_hash() {
  return jit::source_hash(kSource);
}
uint64_t backward_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kSource));
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

std::vector<DeviceCode> forward_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (const RowThreads& config : kRowThreads) {
      for (bool activated : {false, true}) {
        codes.push_back(code_of("forward_any", dtype, config.row_threads, activated));
      }
    }
  }
  return codes;
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes = column_sums_device_code();
  for (DType dtype : kCudaTypes) {
    for (const RowThreads& config : kRowThreads) codes.push_back(code_of("backward_any", dtype, config.row_threads));
    codes.push_back(code_of("sum_columns_any", dtype, 0));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaAny{.name = "cuda_any",
                                                                 .origin = registry::Origin::kOurs,
                                                                 .supports = supports_forward,
                                                                 .configs = forward_configs,
                                                                 .heuristic = forward_heuristic,
                                                                 .run = run_forward,
                                                                 .source_hash = forward_hash,
                                                                 .device_code = forward_code};
constinit const registry::Kernel<BackwardProblem> kBackwardCudaAny{.name = "cuda_any",
                                                                   .origin = registry::Origin::kOurs,
                                                                   .supports = supports_backward,
                                                                   .configs = backward_configs,
                                                                   .heuristic = backward_heuristic,
                                                                   .run = run_backward,
                                                                   .source_hash = backward_hash,
                                                                   .device_code = backward_code};

}  // namespace kernel_pytorch::row_norm
