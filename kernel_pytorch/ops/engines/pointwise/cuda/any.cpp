// Host side of the pointwise kernels for any strides: the last resort on a GPU, so they refuse nothing.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/double_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/launch.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/column_sums.h"

namespace kernel_pytorch::pointwise {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/engines/pointwise/cuda/any.cuh";
constexpr const char* kDoubleSource = "kernel_pytorch/ops/engines/pointwise/cuda/double.cuh";
constexpr int kTypes = std::size(kCudaTypes) + 1;  // the last is fp64
constexpr int type_index(DType dtype) {
  return dtype == DType::kFloat64 ? kTypes - 1 : cuda_type_index(dtype);
}

// `function`: forward or backward.
DeviceCode code_of(std::string_view function, DType dtype) {
  if (dtype == DType::kFloat64) {
    return {.source = kDoubleSource,
            .entry = concat("kernel_pytorch::pointwise::", function, "_double"),
            .minimum_capability = 80,
            .architecture_specific = false};
  }
  return {.source = kSource,
          .entry = concat("kernel_pytorch::pointwise::", function, "_any<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

template <class Problem>
registry::Support supports(const Problem&, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(device));
}

void run_forward(const ForwardProblem& problem, int, Context& context) {
  static const std::string kLabel = "pointwise forward_any";
  static KernelTable<kTypes> table;
  const int64_t elements = problem.gate.element_count();
  if (elements == 0) return;
  const DType dtype = problem.gate.dtype;
  CUkern_st* kernel = table.get(type_index(dtype), context, [&] { return code_of("forward", dtype); });
  AnyForwardArguments arguments{.shape = any_shape_of(problem.gate),
                                .gate = any_tensor_of(problem.gate),
                                .up = any_tensor_of(problem.up),
                                .residual = any_tensor_of(problem.residual),
                                .gate_bias = any_tensor_of(problem.gate_bias),
                                .up_bias = any_tensor_of(problem.up_bias),
                                .output = problem.output.data,
                                .dropout = dropout_arguments(problem.dropout, problem.seed),
                                .kind = problem.kind,
                                .bias_is_float = bias_is_float(problem.gate_bias, problem.up_bias)};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  const int64_t most = 64 * std::max<int64_t>(context.info->cuda.multiprocessors, 1);
  launch.grid_x = static_cast<unsigned>(std::min((elements + kThreads - 1) / kThreads, most));
  launch.block_x = kThreads;
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
}

void run_backward(const BackwardProblem& problem, int, Context& context) {
  static const std::string kLabel = "pointwise backward_any";
  static KernelTable<kTypes> table;
  if (problem.gate.element_count() == 0) {
    return zero_column_sums(problem.grad_gate_bias, problem.grad_up_bias, context);
  }
  const bool is_double = problem.gate.dtype == DType::kFloat64;
  const bool sums_in_one = is_double && (problem.grad_gate_bias.is_present() || problem.grad_up_bias.is_present());
  const int64_t rows = rows_of(problem.gate), columns = columns_of(problem.gate);
  const int64_t strips = (columns + kAnyColumns - 1) / kAnyColumns;
  // Enough ranges of rows to fill the device, each long enough to be worth a partial row.
  const int64_t wanted = std::clamp<int64_t>(16 * context.info->cuda.multiprocessors / strips, 1, 32768);
  const int64_t rows_per_block = sums_in_one ? rows : std::max((rows + wanted - 1) / wanted, int64_t{4 * kAnyRows});
  const int64_t chunks = (rows + rows_per_block - 1) / rows_per_block;
  const ColumnSums sums =
      is_double ? ColumnSums{}
                : allocate_column_sums(problem.grad_gate_bias, problem.grad_up_bias, columns, chunks, context);
  const DType dtype = problem.gate.dtype;
  CUkern_st* kernel = table.get(type_index(dtype), context, [&] { return code_of("backward", dtype); });
  AnyBackwardArguments arguments{.shape = any_shape_of(problem.gate),
                                 .grad_output = any_tensor_of(problem.grad_output),
                                 .gate = any_tensor_of(problem.gate),
                                 .up = any_tensor_of(problem.up),
                                 .gate_bias = any_tensor_of(problem.gate_bias),
                                 .up_bias = any_tensor_of(problem.up_bias),
                                 .grad_gate = any_tensor_of(problem.grad_gate),
                                 .grad_up = any_tensor_of(problem.grad_up),
                                 .dropout = dropout_arguments(problem.dropout, problem.seed),
                                 .gate_partial = sums.partials[0],
                                 .up_partial = sums.partials[1],
                                 .rows_per_block = rows_per_block,
                                 .kind = problem.kind,
                                 .bias_is_float = bias_is_float(problem.gate_bias, problem.up_bias)};
  DoubleBackwardArguments doubles{.rows = arguments,
                                  .grad_gate_bias = any_tensor_of(problem.grad_gate_bias),
                                  .grad_up_bias = any_tensor_of(problem.grad_up_bias)};
  void* pointers[] = {is_double ? static_cast<void*>(&doubles) : &arguments};
  cuda_device::LaunchShape launch;
  launch.grid_x = static_cast<unsigned>(strips);
  launch.grid_y = static_cast<unsigned>(chunks);
  launch.block_x = kThreads;
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
  if (!is_double) add_column_sums(sums, context);
}

uint64_t forward_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kSource));
  mixer.add(jit::source_hash(kDoubleSource));
  return mixer.value();
}
uint64_t backward_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kSource));
  mixer.add(jit::source_hash(kDoubleSource));
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

std::vector<DeviceCode> forward_code() {
  std::vector<DeviceCode> codes = {code_of("forward", DType::kFloat64)};
  for (DType dtype : kCudaTypes) codes.push_back(code_of("forward", dtype));
  return codes;
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes = column_sums_device_code();
  codes.push_back(code_of("backward", DType::kFloat64));
  for (DType dtype : kCudaTypes) codes.push_back(code_of("backward", dtype));
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaAny{.name = "cuda_any",
                                                                 .origin = registry::Origin::kOurs,
                                                                 .supports = supports<ForwardProblem>,
                                                                 .run = run_forward,
                                                                 .source_hash = forward_hash,
                                                                 .device_code = forward_code};
constinit const registry::Kernel<BackwardProblem> kBackwardCudaAny{.name = "cuda_any",
                                                                   .origin = registry::Origin::kOurs,
                                                                   .supports = supports<BackwardProblem>,
                                                                   .run = run_backward,
                                                                   .source_hash = backward_hash,
                                                                   .device_code = backward_code};

}  // namespace kernel_pytorch::pointwise
