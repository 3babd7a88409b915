// Host side of 2:4 compression and back on CUDA.
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/sparse_compress/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/sparse_compress/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::sparse_compress {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/sparse_compress/cuda/kernel.cuh";
constexpr const char* kTooLarge = "has 2^30 columns or more, or more threads than a grid";

registry::Support supports(const TensorView& dense, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(dense.dtype, device)) return registry::Support::no(obstacle);
  const bool is_large =
      dense.sizes[1] >= int64_t{1} << 30 || dense.element_count() / kWordColumns >= (int64_t{1} << 30) * kThreads;
  return registry::Support::unless(is_large ? kTooLarge : nullptr);
}
registry::Support supports_compress(const Compress& problem, const DeviceInfo& device) {
  return supports(problem.x, device);
}
registry::Support supports_decompress(const Decompress& problem, const DeviceInfo& device) {
  return supports(problem.output, device);
}

DeviceCode code_of(std::string_view function, DType dtype, bool is_aligned) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::sparse_compress::", function, "<", size_of(dtype), ", ",
                          bool_name(is_aligned), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run(std::string_view function, KernelTable<4>& kernels, const TensorView& dense, const TensorView& values,
         const TensorView& metadata, Context& context, const std::string& label) {
  if (metadata.element_count() == 0) return;
  const bool is_aligned = dense.sizes[1] % kWordColumns == 0 && vector_access_obstacle(dense) == nullptr &&
                          reinterpret_cast<uintptr_t>(values.data) % 16 == 0;
  const int entry = (size_of(dense.dtype) == 4) * 2 + is_aligned;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return code_of(function, dense.dtype, is_aligned); });
  Arguments arguments{.dense = dense.data,
                      .row_stride = dense.strides[0],
                      .rows = dense.sizes[0],
                      .columns = static_cast<int32_t>(dense.sizes[1]),
                      .words = static_cast<int32_t>(metadata.sizes[0] * 2),
                      .values = values.data,
                      .metadata = metadata.as<uint32_t>()};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.rows * arguments.words, kThreads));
  shape.block_x = kThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void run_compress(const Compress& problem, int, Context& context) {
  static const std::string kLabel = "sparse_compress";
  static KernelTable<4> kernels;
  run("compress", kernels, problem.x, problem.values, problem.metadata, context, kLabel);
}
void run_decompress(const Decompress& problem, int, Context& context) {
  static const std::string kLabel = "sparse_decompress";
  static KernelTable<4> kernels;
  run("decompress", kernels, problem.output, problem.values, problem.metadata, context, kLabel);
}

std::vector<DeviceCode> codes_of(std::string_view function) {
  std::vector<DeviceCode> codes;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const bool is_aligned : {false, true}) codes.push_back(code_of(function, dtype, is_aligned));
  }
  return codes;
}
std::vector<DeviceCode> compress_code() {
  return codes_of("compress");
}
std::vector<DeviceCode> decompress_code() {
  return codes_of("decompress");
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Compress> kCompressCuda{.name = "cuda",
                                                         .supports = supports_compress,
                                                         .run = run_compress,
                                                         .source_hash = source_hash,
                                                         .device_code = compress_code};
constinit const registry::Kernel<Decompress> kDecompressCuda{.name = "cuda",
                                                             .supports = supports_decompress,
                                                             .run = run_decompress,
                                                             .source_hash = source_hash,
                                                             .device_code = decompress_code};

}  // namespace kernel_pytorch::sparse_compress
