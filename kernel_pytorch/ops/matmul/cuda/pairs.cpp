// Host side of the gradient of gated pairs on the GPU.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/matmul/cuda/pairs_cuda.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kPairSource = "kernel_pytorch/ops/matmul/cuda/pairs.cuh";
constexpr int64_t kBlocksEach = 16;  // a multiprocessor

registry::Support supports_pairs(const PairGradient& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(device));
}

int pairs_of_vector(DType dtype) {
  return static_cast<int>(8 / size_of(dtype));
}

DeviceCode pair_code(DType dtype, int pairs) {
  const bool is_double = dtype == DType::kFloat64;
  return {.source = kPairSource,
          .entry = is_double
                       ? std::string("kernel_pytorch::matmul::pair_gradient_double")
                       : concat("kernel_pytorch::matmul::pair_gradient<", element_type_name(dtype), ", ", pairs, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_pairs(const PairGradient& problem, int, Context& context) {
  static const std::string kLabel = "gated pairs";
  static KernelTable<7> kernels;  // the last is of fp64
  if (problem.saved.element_count() == 0) return;
  const DType dtype = problem.saved.dtype;
  const int64_t columns = problem.grad_output.sizes[1];
  const bool is_double = dtype == DType::kFloat64;
  const bool is_vector = !is_double && has_aligned_rows(problem.saved) && has_aligned_rows(problem.grad_input) &&
                         columns % pairs_of_vector(dtype) == 0;
  const int pairs = is_vector ? pairs_of_vector(dtype) : 1;
  CUkern_st* kernel = kernels.get(is_double ? 6 : cuda_type_index(dtype) * 2 + is_vector, context,
                                  [&] { return pair_code(dtype, pairs); });
  PairArguments arguments = {.grad_output = problem.grad_output.data,
                             .saved = problem.saved.data,
                             .grad_input = problem.grad_input.data,
                             .grad_output_row = problem.grad_output.strides[0],
                             .saved_row = problem.saved.strides[0],
                             .grad_input_row = problem.grad_input.strides[0],
                             .rows = problem.saved.sizes[0],
                             .columns = static_cast<int32_t>(columns),
                             .kind = problem.activation};
  const int64_t work = divide_up(arguments.rows * (columns / pairs), kPairThreads);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min(work, kBlocksEach * std::max(context.info->cuda.multiprocessors, 1)));
  shape.block_x = kPairThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t pair_source_hash() {
  return jit::source_hash(kPairSource);
}

std::vector<DeviceCode> pair_device_code() {
  std::vector<DeviceCode> codes = {pair_code(DType::kFloat64, 1)};
  for (const DType dtype : kCudaTypes) {
    for (const int pairs : {1, pairs_of_vector(dtype)}) codes.push_back(pair_code(dtype, pairs));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<PairGradient> kPairCuda{.name = "cuda",
                                                         .origin = registry::Origin::kOurs,
                                                         .supports = supports_pairs,
                                                         .configs = nullptr,
                                                         .heuristic = nullptr,
                                                         .run = run_pairs,
                                                         .source_hash = pair_source_hash,
                                                         .device_code = pair_device_code};

}  // namespace kernel_pytorch::matmul
