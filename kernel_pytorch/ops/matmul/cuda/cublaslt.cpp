// The vendor's GEMM as a listed kernel: what cuBLASLt computes as matmul means it. Listed after our own kernels, so
// that it runs where it was measured to be faster, or asked for by name, and never by itself.
#include <algorithm>
#include <limits>
#include <string>

#include "kernel_pytorch/ops/engines/gemm/cublaslt.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kVendorForm =
    "takes plain products with relu or no activation, without a preactivation and sums of rows";
constexpr const char* kVendorRows = "takes matrices whose rows do not overlap";
constexpr const char* kVendorBias = "takes a bias of the output's type";
constexpr const char* kVendorResidual = "takes a residual of the output's type, and no activation then";
constexpr const char* kVendorPrecision = "multiplies fp32 as it is: tf32 and bf16 may be rounded otherwise than ours";
constexpr const char* kVendorNothing = "there is nothing to multiply";
constexpr const char* kVendorTooLarge = "a size is 2^31 or more";

registry::Support supports_cublaslt(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  const bool relu = problem.activation == Kind::kRelu;
  if (problem.form != Form::kPlain || problem.preactivation.is_present() || problem.row_sums.is_present() ||
      (problem.activation != Kind::kIdentity && !relu)) {
    return registry::Support::no(kVendorForm);
  }
  if (problem.bias.is_present() && problem.bias.dtype != problem.output.dtype) {
    return registry::Support::no(kVendorBias);
  }
  if (problem.residual.is_present() && (relu || problem.residual.dtype != problem.output.dtype)) {
    return registry::Support::no(kVendorResidual);
  }
  for (const TensorView* view : {&problem.a, &problem.b, &problem.residual}) {
    if (!has_distinct_lines(*view)) return registry::Support::no(kVendorRows);
  }
  if (problem.precision != Precision::kFull) return registry::Support::no(kVendorPrecision);
  const Sizes sizes = sizes_of(problem);
  if (std::min({sizes.batch, sizes.m, sizes.n, sizes.k}) == 0) return registry::Support::no(kVendorNothing);
  if (std::max({sizes.batch, sizes.m, sizes.n, sizes.k}) > std::numeric_limits<int32_t>::max()) {
    return registry::Support::no(kVendorTooLarge);
  }
  return registry::Support::unless(vendor::cublaslt_obstacle(device));
}

std::vector<std::string> configs_of_cublaslt(const Product&, const DeviceInfo&) {
  return vendor::cublaslt_configs();
}

void run_cublaslt(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul cublaslt";
  vendor::cublaslt_multiply({.a = problem.a,
                             .b = problem.b,
                             .bias = problem.bias,
                             .residual = problem.residual,
                             .output = problem.output,
                             .alpha = static_cast<float>(problem.alpha),
                             .beta = static_cast<float>(problem.beta),
                             .relu = problem.activation == Kind::kRelu},
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

}  // namespace kernel_pytorch::matmul
