#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/row_norm/row_norm_launch.h"
#include "kernel_pytorch/ops/row_norm/row_norm_reduce.h"

namespace kernel_pytorch::row_norm {
namespace {

DeviceCode code_of(DType dtype) {
  return {.source = "kernel_pytorch/ops/row_norm/row_norm_reduce_cuda.cuh",
          .entry = concat("kernel_pytorch::row_norm::reduce_partials<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

}  // namespace

Partials allocate_partials(const BackwardProblem& problem, int64_t count, Context& context) {
  const size_t bytes = static_cast<size_t>(count * columns_of(problem.value)) * sizeof(float);
  Partials partials;
  if (problem.grad_weight.is_present()) partials.weight = static_cast<float*>(context.scratch->allocate(bytes));
  if (problem.grad_bias.is_present()) partials.bias = static_cast<float*>(context.scratch->allocate(bytes));
  return partials;
}

void reduce(const BackwardProblem& problem, const Partials& partials, int64_t count, Context& context) {
  static const std::string kLabel = "row_norm reduce_partials";
  static KernelTable<std::size(kCudaTypes)> table;
  if (partials.weight == nullptr && partials.bias == nullptr) return;
  const DType dtype = (partials.weight != nullptr ? problem.grad_weight : problem.grad_bias).dtype;
  KP_INTERNAL_CHECK(partials.weight == nullptr || partials.bias == nullptr || problem.grad_bias.dtype == dtype,
                    "row_norm: grad_weight is ", dtype, " and grad_bias is ", problem.grad_bias.dtype);
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return code_of(dtype); });
  const int64_t columns = columns_of(problem.value);
  ReduceArguments arguments{.partials = {partials.weight, partials.bias},
                            .outputs = {problem.grad_weight.data, problem.grad_bias.data},
                            .columns = columns,
                            .count = static_cast<int32_t>(count)};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>((columns + kReduceColumns - 1) / kReduceColumns);
  shape.grid_y = partials.bias == nullptr ? 1 : 2;
  shape.block_x = kReduceColumns * kReduceRows;
  shape.programmatic_dependent = context.info->cuda.capability() >= 90;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void zero_parameter_gradients(const BackwardProblem& problem, Context& context) {
  for (const TensorView* gradient : {&problem.grad_weight, &problem.grad_bias}) {
    if (!gradient->is_present() || gradient->byte_count() == 0) continue;
    cuda_device::fill_bytes(context.info->device.index, gradient->data, 0, gradient->byte_count(), context.stream);
  }
}

std::vector<DeviceCode> reduce_device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) codes.push_back(code_of(dtype));
  return codes;
}

}  // namespace kernel_pytorch::row_norm
