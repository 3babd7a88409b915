// What FP8 does on every compute capability: one table, walked with made-up devices. What a GPU cannot run is refused
// with a reason, before anything is converted; where it has FP8 units that a listed kernel uses, the plain fp32 kernel
// is not what it gets.
#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/ops/engines/gemm/cublaslt.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch {
namespace {

struct Row {
  int major, minor;
  const char *quantize, *scaled_matmul, *scaled_grouped_matmul, *attention_fp8, *paged_e4m3;  // "": refused
};
// "cublaslt": that where the library is there, else "cuda_mma".
constexpr Row kTable[] = {
    {7, 5, "", "", "", "", ""},
    {8, 0, "", "", "", "", "cuda"},
    {8, 6, "", "", "", "", "cuda"},
    {8, 7, "", "", "", "", "cuda"},
    {8, 9, "cuda_tiles", "cublaslt", "", "rounded", "cuda"},
    {9, 0, "cuda_tiles", "sm90_wgmma", "sm90_wgmma", "sm90_wgmma", "sm90"},
    {10, 0, "cuda_tiles", "cublaslt", "", "rounded", "cuda"},
    {10, 3, "cuda_tiles", "cublaslt", "", "rounded", "cuda"},
    {12, 0, "cuda_tiles", "cublaslt", "", "rounded", "cuda"},
    {12, 1, "cuda_tiles", "cublaslt", "", "rounded", "cuda"},
};

DeviceInfo gpu(int major, int minor) {
  DeviceInfo info;
  info.device = {DeviceKind::kCuda, 0};
  info.cuda.compute_major = major;
  info.cuda.compute_minor = minor;
  info.cuda.multiprocessors = 132;
  const CudaCapability capability = cuda_capability(info.cuda.capability());
  info.cuda.shared_bytes_per_block = int64_t{capability.shared_kib_per_block} << 10;
  info.cuda.shared_bytes_per_multiprocessor = int64_t{capability.shared_kib_per_multiprocessor} << 10;
  return info;
}

// The kernel that a call gets, "" where none takes it; then each says why.
std::string chosen(std::string_view op, std::vector<int64_t> shape, registry::RequestOptions options,
                   const DeviceInfo& device) {
  const registry::AnyOperation* operation = find_operation(op);
  const auto problem = operation->make_on(
      {.shape = std::move(shape), .dtype = DType::kBFloat16, .device = device.device, .options = std::move(options)},
      device);
  for (int i = 0; i < problem->kernel_count(); ++i) {
    const registry::Support support = problem->supports(i);
    if (support) return std::string(problem->kernel_name(i));
    EXPECT_NE(support.reason(), "") << op << " " << problem->kernel_name(i);
  }
  return "";
}

TEST(Float8Capabilities, EveryOpOnEveryCapability) {
  const bool has_vendor = vendor::cublaslt_obstacle(DeviceInfo{}) == nullptr;
  for (const Row& row : kTable) {
    const DeviceInfo device = gpu(row.major, row.minor);
    const std::string place = concat("compute capability ", row.major, ".", row.minor);
    const std::string product = row.scaled_matmul;
    EXPECT_EQ(chosen("quantize", {256, 512}, {}, device), row.quantize) << place;
    EXPECT_EQ(chosen("scaled_matmul", {256, 512, 1024}, {}, device),
              product == "cublaslt" && !has_vendor ? "cuda_mma" : product)
        << place;
    EXPECT_EQ(chosen("scaled_matmul", {256, 512, 1024}, {{"scale_a", "1x128"}, {"scale_b", "128x128"}}, device),
              product == "cublaslt" ? "cuda_mma" : product)
        << place;
    EXPECT_EQ(chosen("scaled_grouped_matmul", {256, 512, 1024, 4}, {}, device), row.scaled_grouped_matmul) << place;
    EXPECT_EQ(chosen("attention_fp8_forward", {1, 2, 256, 128}, {}, device), row.attention_fp8) << place;
    EXPECT_EQ(chosen("paged_attention", {2, 1, 8, 128}, {{"key_heads", "2"}, {"cache", "e4m3"}}, device),
              row.paged_e4m3)
        << place;
  }
}

}  // namespace
}  // namespace kernel_pytorch
