// Host side of merging on CUDA.
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/merge_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/merge_attention/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::merge_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/merge_attention/cuda/kernel.cuh";

DeviceCode code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::merge_attention::merge<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Merge& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.output.dtype, device)) return registry::Support::no(obstacle);
  const int64_t rows = problem.output.sizes[0] * problem.output.sizes[1];
  return registry::Support::unless(rows >= int64_t{1} << 31 ? "has 2^31 heads of tokens or more" : nullptr);
}

Rows place_of(const TensorView& view) {
  return {.data = view.data, .token_stride = view.strides[0], .head_stride = view.strides[1]};
}
Sums lse_of(const TensorView& view) {
  if (!view.is_present()) return {};
  return {.data = view.as<const float>(), .head_stride = view.strides[0], .token_stride = view.strides[1]};
}
bool has_vectors(const TensorView& view) {
  const int64_t element = size_of(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.strides[0] * element % 16 == 0 &&
         view.strides[1] * element % 16 == 0 && view.sizes[2] * element % 16 == 0;
}

void run(const Merge& problem, int, Context& context) {
  static const std::string kLabel = "merge_attention";
  static KernelTable<3> kernels;
  const TensorView& output = problem.output;
  if (output.element_count() == 0 && (!problem.lse.is_present() || problem.lse.element_count() == 0)) return;
  CUkern_st* kernel = kernels.get(cuda_type_index(output.dtype), context, [&] { return code_of(output.dtype); });
  MergeArguments arguments{
      .first = place_of(problem.output1),
      .second = place_of(problem.output2),
      .output = place_of(output),
      .first_lse = lse_of(problem.lse1),
      .second_lse = lse_of(problem.lse2),
      .lse = lse_of(problem.lse),
      .rows = output.sizes[0] * output.sizes[1],
      .heads = static_cast<int32_t>(output.sizes[1]),
      .size = static_cast<int32_t>(output.sizes[2]),
      .is_aligned = has_vectors(problem.output1) && has_vectors(problem.output2) && has_vectors(output)};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.rows, kWarps));
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

constinit const registry::Kernel<Merge> kMergeCuda{
    .name = "cuda", .supports = supports, .run = run, .source_hash = source_hash, .device_code = device_code};

}  // namespace kernel_pytorch::merge_attention
