// Host side of the product of 8-bit integers on CUDA: rows of x become codes in scratch memory by a launch of their
// own.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/int8_matmul/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/int8_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::int8_matmul {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/int8_matmul/cuda/kernel.cuh";
constexpr const char* kTooLarge = "m, n or k is 2^30 or more, or there are more than 65,535 * 64 rows";

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  const int64_t m = problem.x.sizes[0], n = problem.weight.sizes[0], k = problem.x.sizes[1];
  const bool is_large = std::max({m, n, k}) >= int64_t{1} << 30 || m > int64_t{65535} * kRows;
  return registry::Support::unless(is_large ? kTooLarge : nullptr);
}

DeviceCode round_code(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::int8_matmul::round_rows<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode product_code(bool is_aligned) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::int8_matmul::product<", is_aligned ? "true" : "false", ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// Codes and scales of x, in scratch memory.
void round_rows(const Product& problem, ProductArguments* product, Context& context) {
  static const std::string kLabel = "int8_matmul round";
  static KernelTable<3> kernels;
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], stride = divide_up(k, 16) * 16;
  auto* codes = static_cast<int8_t*>(context.scratch->allocate(static_cast<size_t>(m * stride)));
  auto* scales = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(m) * sizeof(float)));
  CUkern_st* kernel =
      kernels.get(cuda_type_index(problem.x.dtype), context, [&] { return round_code(problem.x.dtype); });
  RoundArguments arguments{.x = problem.x.data,
                           .x_stride = problem.x.strides[0],
                           .k = static_cast<int32_t>(k),
                           .codes = codes,
                           .code_stride = stride,
                           .scales = scales};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(m);
  shape.block_x = kThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  product->x = codes;
  product->x_stride = stride;
  product->scale_x = scales;
}

void run(const Product& problem, int, Context& context) {
  static const std::string kLabel = "int8_matmul";
  static KernelTable<2> kernels;
  const int64_t m = problem.x.sizes[0], n = problem.weight.sizes[0], k = problem.x.sizes[1];
  if (m == 0 || n == 0) return;
  ProductArguments arguments{};
  arguments.tile.m = static_cast<int32_t>(m);
  arguments.tile.n = static_cast<int32_t>(n);
  arguments.tile.k = static_cast<int32_t>(k);
  arguments.tile.alpha = 1;
  arguments.tile.kind = problem.activation;
  arguments.tile.bias = product::tile_matrix(problem.bias);
  arguments.tile.output = product::tile_matrix(problem.output);
  arguments.x = problem.x.as<const int8_t>();
  arguments.x_stride = problem.x.strides[0];
  arguments.scale_x = problem.scale_x.as<const float>();
  arguments.weight = problem.weight.as<const int8_t>();
  arguments.scale_weight = problem.scale_weight.as<const float>();
  arguments.groups = static_cast<int32_t>(problem.scale_weight.sizes[1]);
  arguments.block = static_cast<int32_t>(block_of(problem));
  if (!has_codes(problem)) round_rows(problem, &arguments, context);
  const auto starts = reinterpret_cast<uintptr_t>(arguments.x) | reinterpret_cast<uintptr_t>(arguments.weight) |
                      static_cast<uintptr_t>(arguments.x_stride) | static_cast<uintptr_t>(k);
  const bool is_aligned = starts % 16 == 0;
  CUkern_st* kernel = kernels.get(is_aligned, context, [&] { return product_code(is_aligned); });
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(n, kColumns));
  shape.grid_y = static_cast<unsigned>(divide_up(m, kRows));
  shape.block_x = kThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  return {product_code(true), product_code(false), round_code(DType::kFloat32), round_code(DType::kBFloat16),
          round_code(DType::kFloat16)};
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaMma{
    .name = "cuda_mma", .supports = supports, .run = run, .source_hash = source_hash, .device_code = device_code};

}  // namespace kernel_pytorch::int8_matmul
