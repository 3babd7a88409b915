// Host side of sampling on CUDA.
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/sample/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/sample/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::sample {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/sample/cuda/kernel.cuh";

DeviceCode code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::sample::draw<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Draw& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.logits.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(problem.logits.sizes[0] >= int64_t{1} << 31 ? "has 2^31 rows or more" : nullptr);
}

void run(const Draw& problem, int, Context& context) {
  static const std::string kLabel = "sample";
  static KernelTable<3> kernels;
  const TensorView& logits = problem.logits;
  if (logits.sizes[0] == 0) return;
  CUkern_st* kernel = kernels.get(cuda_type_index(logits.dtype), context, [&] { return code_of(logits.dtype); });
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 &&
                          (logits.sizes[0] == 1 || logits.strides[0] * size_of(logits.dtype) % 16 == 0);
  DrawArguments arguments{.logits = logits.data,
                          .row_stride = logits.strides[0],
                          .temperature = problem.temperature.as<const float>(),
                          .top_p = problem.top_p.as<const float>(),
                          .min_p = problem.min_p.as<const float>(),
                          .top_k = problem.top_k.as<const int32_t>(),
                          .seeds = problem.seeds.data,
                          .positions = problem.positions.data,
                          .tokens = problem.tokens.as<int32_t>(),
                          .count = static_cast<int32_t>(logits.sizes[1]),
                          .has_wide_seeds = problem.seeds.dtype == DType::kInt64,
                          .has_wide_positions = problem.positions.dtype == DType::kInt64,
                          .is_aligned = is_aligned};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(logits.sizes[0]);
  shape.block_x = kThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) codes.push_back(code_of(dtype));
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Draw> kDrawCuda{
    .name = "cuda", .supports = supports, .run = run, .source_hash = source_hash, .device_code = device_code};

}  // namespace kernel_pytorch::sample
