// Host side of the poolings on the GPU: how the threads of a block share tokens and columns, and into how many parts a
// long mean is cut.
#include <algorithm>
#include <bit>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/mean_pooling/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::mean_pooling {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/mean_pooling/cuda/kernel.cuh";
constexpr int kTypes = std::size(kCudaTypes);

DeviceCode code_of(std::string_view function, DType dtype, bool has_vectors) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::mean_pooling::", function, "<", element_type_name(dtype), ", ",
                          bool_name(has_vectors), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.x.dtype, device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.grad_input.dtype, device));
}

bool has_vectors(const TensorView& x, const TensorView& rows) {
  return has_aligned_rows(x) && is_aligned(rows, kVectorBytes) && (x.sizes[3] == 1 || x.strides[3] == 1) &&
         x.sizes[3] * size_of(x.dtype) % kVectorBytes == 0;
}

Means means_of(const Sizes& sizes, const TensorView& offsets) {
  KP_CHECK(sizes.means < int64_t{1} << 31 && sizes.inner < int64_t{1} << 31, "mean pooling: x has ", sizes.means,
           " means of ", sizes.inner, " rows; at most 2^31 - 1 of each are supported");
  return {.offsets = offsets.data,
          .tokens = sizes.tokens,
          .chunk = std::max<int64_t>(sizes.chunk, 1),
          .count = static_cast<int32_t>(sizes.means),
          .inner = static_cast<int32_t>(sizes.inner),
          .offsets_are_wide = offsets.dtype == DType::kInt64};
}

unsigned grid_of(int64_t blocks) {
  KP_CHECK(blocks < int64_t{1} << 31, "mean pooling: the tensors need ", blocks,
           " blocks; at most 2^31 - 1 are supported, split the batch");
  return static_cast<unsigned>(blocks);
}

// Threads that share a row: as many as it has vectors, up to a warp.
int64_t lanes_for(int64_t row_vectors) {
  return std::min<int64_t>(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(row_vectors))), 32);
}

// How the threads of a block share tokens and columns, and how many blocks share a mean. All blocks should be resident
// at once, and a multiprocessor full of them. Narrower blocks, down to 128 bytes of a row, come before parts of a mean:
// those need counters and a second visit to their sums.
struct Split {
  int64_t lanes, strips, parts;
};
Split split_of(const Sizes& sizes, int64_t row_vectors, const DeviceInfo& device) {
  constexpr int64_t kFewestLanes = 8;
  const int64_t resident = int64_t{kBlocksPerMultiprocessor} * std::max(device.cuda.multiprocessors, 1);
  const int64_t mean_tokens = std::max<int64_t>(sizes.tokens / std::max<int64_t>(sizes.means, 1), 1);
  const auto strips_of = [&](int64_t lanes) { return (row_vectors + lanes - 1) / lanes; };
  const auto enough_tokens = [&](int64_t lanes) { return mean_tokens * lanes >= int64_t{4} * kAhead * kThreads; };
  int64_t lanes = lanes_for(row_vectors);
  while (lanes > kFewestLanes && sizes.rows() * strips_of(lanes) * 2 <= resident && enough_tokens(lanes / 2))
    lanes /= 2;
  const int64_t blocks = std::max<int64_t>(sizes.rows() * strips_of(lanes), 1);
  const int64_t most = mean_tokens * lanes / (int64_t{4} * kAhead * kThreads);
  return {lanes, strips_of(lanes), std::clamp<int64_t>(std::min(resident / blocks, most), 1, 64)};
}

void run_forward(const Forward& problem, int, Context& context) {
  static const std::string kLabel = "mean pooling forward";
  static KernelTable<kTypes * 2> table;
  if (problem.output.element_count() == 0) return;
  const Sizes sizes(problem.x, problem.offsets, problem.chunk_size);
  const TensorView& x = problem.x;
  const bool vectors = has_vectors(x, problem.output);
  const int64_t vector_elements = vectors ? 16 / size_of(x.dtype) : 1;
  const int64_t row_vectors = sizes.columns / vector_elements;
  const auto [lanes, strips, parts] = split_of(sizes, row_vectors, *context.info);
  KP_CHECK(strips < 65536, "mean pooling: rows have ", sizes.columns, " columns; at most ", 65535 * 32,
           " vectors of them are supported");
  ForwardArguments arguments{.means = means_of(sizes, problem.offsets),
                             .x = x.data,
                             .output = problem.output.data,
                             .batch_stride = x.strides[0],
                             .token_stride = x.strides[1],
                             .inner_stride = x.strides[2],
                             .column_stride = x.strides[3],
                             .columns = sizes.columns,
                             .lanes = static_cast<int32_t>(lanes),
                             .parts = 1,
                             .partials = nullptr,
                             .arrived = nullptr};
  if (parts > 1) {
    const auto partial_bytes = static_cast<size_t>(sizes.rows() * parts * sizes.columns) * sizeof(float);
    const auto arrived_bytes = static_cast<size_t>(sizes.rows() * strips) * sizeof(uint32_t);
    arguments.parts = static_cast<int32_t>(parts);
    arguments.partials = static_cast<float*>(context.scratch->allocate(partial_bytes));
    arguments.arrived = static_cast<uint32_t*>(context.scratch->allocate(arrived_bytes));
    cuda_device::fill_bytes(context.info->device.index, arguments.arrived, 0, arrived_bytes, context.stream);
  }
  CUkern_st* kernel =
      table.get(cuda_type_index(x.dtype) * 2 + vectors, context, [&] { return code_of("forward", x.dtype, vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(sizes.rows() * parts);
  shape.grid_y = static_cast<unsigned>(strips);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_backward(const Backward& problem, int, Context& context) {
  static const std::string kLabel = "mean pooling backward";
  static KernelTable<kTypes * 2> table;
  const TensorView& gradient = problem.grad_input;
  if (gradient.element_count() == 0) return;
  const Sizes sizes(gradient, problem.offsets, problem.chunk_size);
  const bool vectors = has_vectors(gradient, problem.grad_output);
  const int64_t lanes = lanes_for(sizes.columns / (vectors ? 16 / size_of(gradient.dtype) : 1));
  const int64_t rows = sizes.batch * sizes.tokens * sizes.inner;
  BackwardArguments arguments{.means = means_of(sizes, problem.offsets),
                              .grad_output = problem.grad_output.data,
                              .grad_input = gradient.data,
                              .rows = rows,
                              .columns = sizes.columns,
                              .lanes = static_cast<int32_t>(lanes),
                              .is_small = std::max(rows, sizes.chunk) < int64_t{1} << 31};
  CUkern_st* kernel = table.get(cuda_type_index(gradient.dtype) * 2 + vectors, context,
                                [&] { return code_of("backward", gradient.dtype, vectors); });
  const int64_t rows_per_block = kThreads / lanes;
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of((rows + rows_per_block - 1) / rows_per_block);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> all_code(std::string_view function) {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (bool vectors : {false, true}) codes.push_back(code_of(function, dtype, vectors));
  }
  return codes;
}
std::vector<DeviceCode> forward_code() {
  return all_code("forward");
}
std::vector<DeviceCode> backward_code() {
  return all_code("backward");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::mean_pooling
