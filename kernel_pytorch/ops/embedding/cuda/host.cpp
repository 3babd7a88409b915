// Host side of embedding on the GPU: which unit rows are copied in, and how the table is shared out among blocks.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/embedding/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/support/any_rows.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::embedding {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/embedding/cuda/kernel.cuh";
constexpr std::string_view kUnitNames[] = {"kernel_pytorch::ptx::Word4", "uint32_t", "uint16_t"};
constexpr int64_t kUnitBytes[] = {16, 4, 2};
constexpr int kUnitKinds = std::size(kUnitNames);
constexpr int kTypes = std::size(kCudaTypes);

DeviceCode forward_code(int unit) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::embedding::forward<", kUnitNames[unit], ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode backward_code(DType dtype, bool has_vectors) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::embedding::backward<", element_type_name(dtype), ", ",
                          bool_name(has_vectors), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.weight.dtype, device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.grad_weight.dtype, device));
}

uint32_t nan_word(DType dtype) {
  return dtype == DType::kFloat32 ? 0x7fc00000u : dtype == DType::kBFloat16 ? 0x7fc07fc0u : 0x7e007e00u;
}

void run_forward(const Forward& problem, int, Context& context) {
  static const std::string kLabel = "embedding forward";
  static KernelTable<kUnitKinds> table;
  if (problem.output.element_count() == 0) return;
  const TensorView& weight = problem.weight;
  const int64_t element_bytes = size_of(weight.dtype), columns = columns_of(weight);
  const bool has_vectors =
      vector_access_obstacle(weight) == nullptr && vector_access_obstacle(problem.output) == nullptr;
  const int unit = has_vectors ? 0 : element_bytes == 4 ? 1 : 2;
  const int64_t unit_bytes = kUnitBytes[unit];
  const int64_t row_units = columns * element_bytes / unit_bytes;
  KP_CHECK(row_units < int64_t{1} << 30, "embedding: weight has ", columns, " columns; at most 2^30 are supported");
  ForwardArguments arguments{.indices = problem.indices.data,
                             .weight = weight.data,
                             .output = problem.output.data,
                             .positions = problem.indices.element_count(),
                             .rows = weight.sizes[0],
                             .row_stride_units = weight.strides[0] * element_bytes / unit_bytes,
                             .unit_stride_units = has_vectors ? 1 : weight.strides[1],
                             .row_units = static_cast<int32_t>(row_units),
                             .nan_word = nan_word(weight.dtype),
                             .indices_are_wide = problem.indices.dtype == DType::kInt64};
  CUkern_st* kernel = table.get(unit, context, [&] { return forward_code(unit); });
  constexpr int64_t kBlockUnits = kThreads * kForwardUnits;
  const int64_t blocks = (arguments.positions * row_units + kBlockUnits - 1) / kBlockUnits;
  KP_CHECK(blocks < int64_t{1} << 31, "embedding: output has ", problem.output.element_count(),
           " elements; that many need two calls");
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_backward(const Backward& problem, int, Context& context) {
  static const std::string kLabel = "embedding backward";
  static KernelTable<kTypes * 2> table;
  const TensorView& gradient = problem.grad_weight;
  if (gradient.element_count() == 0) return;
  const int device = context.info->device.index;
  if (problem.indices.element_count() == 0) {
    return cuda_device::fill_bytes(device, gradient.data, 0, gradient.byte_count(), context.stream);
  }
  const bool has_vectors = vector_access_obstacle(problem.grad_output) == nullptr && is_aligned(gradient, kVectorBytes);
  const DType dtype = gradient.dtype;
  const int64_t rows = gradient.sizes[0], columns = columns_of(gradient);
  const int64_t strip_columns = 32 * kBackwardVectors * (has_vectors ? 16 / size_of(dtype) : 1);
  const int64_t strips = (columns + strip_columns - 1) / strip_columns;
  // As many rows a block as leave no more blocks than run at once: each block looks through all indices.
  const int64_t resident = int64_t{kBackwardBlocks} * std::max(context.info->cuda.multiprocessors, 1);
  const int64_t wanted = divide_up(rows, std::max<int64_t>(resident / strips, 1));
  BackwardArguments arguments{.shape = any_shape_of(problem.grad_output),
                              .grad_output = any_tensor_of(problem.grad_output),
                              .indices = problem.indices.data,
                              .grad_weight = gradient.data,
                              .rows = rows,
                              .padding_index = problem.padding_index,
                              .rows_per_block = static_cast<int32_t>(std::clamp<int64_t>(wanted, 8, kMostRowsPerBlock)),
                              .indices_are_wide = problem.indices.dtype == DType::kInt64};
  KP_CHECK(strips < 65536, "embedding: grad_weight has ", columns, " columns; at most ", 65535 * strip_columns,
           " are supported");
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype) * 2 + has_vectors, context, [&] { return backward_code(dtype, has_vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>((rows + arguments.rows_per_block - 1) / arguments.rows_per_block);
  shape.grid_y = static_cast<unsigned>(strips);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> all_forward_code() {
  std::vector<DeviceCode> codes;
  for (int unit = 0; unit < kUnitKinds; ++unit) codes.push_back(forward_code(unit));
  return codes;
}
std::vector<DeviceCode> all_backward_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (bool has_vectors : {false, true}) codes.push_back(backward_code(dtype, has_vectors));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = all_forward_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = all_backward_code};

}  // namespace kernel_pytorch::embedding
