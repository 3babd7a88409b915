// The vendor's FP8 GEMM as a listed kernel: cuBLASLt's, with one scale for each matrix. Listed after our kernel on
// Hopper's tensor cores, and before the one that multiplies in fp32: other GPUs with FP8 (8.9, 10.x, 12.x) use theirs.
#include <algorithm>
#include <limits>
#include <string>

#include "kernel_pytorch/ops/engines/gemm/cublaslt.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

constexpr const char* kVendorScales = "takes one scale for each matrix";
constexpr const char* kVendorTypes = "takes no product of e5m2 by e5m2, and makes no FP8 output or amax";
constexpr const char* kVendorBias = "takes a bias of a 16-bit output's type";
constexpr const char* kVendorSizes =
    "takes n and k that are multiples of 16, rows at multiples of 16 bytes, sizes below 2^31";

bool has_rows_of_16_bytes(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.strides[0] >= view.sizes[1] &&
         view.strides[0] * size_of(view.dtype) % 16 == 0;
}

registry::Support supports_cublaslt(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = float8_obstacle(device)) return registry::Support::no(obstacle);
  if (scaling_of_a(problem) != Scaling::kTensor || scaling_of_b(problem) != Scaling::kTensor) {
    return registry::Support::no(kVendorScales);
  }
  const bool both_wide = problem.a.dtype == DType::kFloat8E5M2 && problem.b.dtype == DType::kFloat8E5M2;
  if (both_wide || size_of(problem.output.dtype) == 1 || problem.amax.is_present()) {
    return registry::Support::no(kVendorTypes);
  }
  if (problem.bias.is_present() && (problem.bias.dtype != problem.output.dtype || size_of(problem.output.dtype) != 2)) {
    return registry::Support::no(kVendorBias);
  }
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0], k = problem.a.sizes[1];
  if (std::min({m, n, k}) == 0 || std::max({m, n, k}) > std::numeric_limits<int32_t>::max() || n % 16 != 0 ||
      k % 16 != 0 || !has_rows_of_16_bytes(problem.a) || !has_rows_of_16_bytes(problem.b) ||
      !has_rows_of_16_bytes(problem.output)) {
    return registry::Support::no(kVendorSizes);
  }
  return registry::Support::unless(vendor::cublaslt_obstacle(device));
}

std::vector<std::string> configs_of_cublaslt(const Product&, const DeviceInfo&) {
  return vendor::cublaslt_configs();
}

// [1, rows, columns], or its transpose.
TensorView one_of_a_batch(const TensorView& matrix, bool transposed) {
  TensorView view = matrix;
  view.rank = 3;
  view.sizes = {1, matrix.sizes[transposed ? 1 : 0], matrix.sizes[transposed ? 0 : 1]};
  view.strides = {0, transposed ? 1 : matrix.strides[0], transposed ? matrix.strides[0] : 1};
  return view;
}

void run_cublaslt(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "scaled_matmul cublaslt";
  vendor::cublaslt_multiply({.a = one_of_a_batch(problem.a, false),
                             .b = one_of_a_batch(problem.b, true),
                             .bias = problem.bias,
                             .residual = {},
                             .output = one_of_a_batch(problem.output, false),
                             .fast_accumulator = !problem.accurate,
                             .scale_a = problem.scale_a.as<const float>(),
                             .scale_b = problem.scale_b.as<const float>()},
                            config, context, kLabel);
}

}  // namespace

constinit const registry::Kernel<Product> kCublasLt{.name = "cublaslt",
                                                    .origin = registry::Origin::kVendor,
                                                    .supports = supports_cublaslt,
                                                    .configs = configs_of_cublaslt,
                                                    .heuristic = nullptr,
                                                    .run = run_cublaslt,
                                                    .source_hash = nullptr,
                                                    .device_code = nullptr};

}  // namespace kernel_pytorch::scaled_matmul
