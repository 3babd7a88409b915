#include "kernel_pytorch/device/cuda/capability.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"

namespace kernel_pytorch {
namespace {

std::atomic<int> pretended{0};
constexpr int kDevices = 64;
std::array<std::atomic<int>, kDevices> actual{};  // of devices that pretend

bool has(const CudaCapability& row, CudaFeature feature) {
  switch (feature) {
    case CudaFeature::kMma:
      return row.number >= 80;
    case CudaFeature::kFloat8:
      return row.float8;
    case CudaFeature::kBulkCopy:
    case CudaFeature::kCluster:
    case CudaFeature::kDependentLaunch:
      return row.hopper;
    case CudaFeature::kWgmma:
      return row.wgmma;
    case CudaFeature::kTensorMemory:
      return row.tensor_memory;
  }
  return false;
}

CudaCapability row_of(const DeviceInfo& device) {
  return device.is_amd() ? kAmdGpu : cuda_capability(device.cuda.capability());
}

}  // namespace

CudaCapability cuda_capability(int number) {
  const CudaCapability* found = nullptr;
  for (const CudaCapability& row : kCudaCapabilities) {
    if (row.number <= number) found = &row;
  }
  if (found == nullptr) return {number, 48, 64, 1024, 1, false, false, false, false};  // what every capability has
  CudaCapability row = *found;
  if (row.number != number) row.cluster_blocks = std::min(row.cluster_blocks, 8), row.wgmma = row.tensor_memory = false;
  row.number = number;
  return row;
}

int most_cluster_blocks(const DeviceInfo& device) {
  return row_of(device).cluster_blocks;
}

bool has_feature(const DeviceInfo& device, CudaFeature feature) {
  return device.is_cuda() && has(row_of(device), feature);
}

const char* feature_obstacle(const DeviceInfo& device, CudaFeature feature) {
  if (!device.is_cuda()) return "runs on CUDA devices only";
  if (has_feature(device, feature)) return nullptr;
  if (device.is_amd()) return "needs instructions of NVIDIA's newer GPUs that AMD's have no form of";
  switch (feature) {
    case CudaFeature::kMma:
      return "needs compute capability 8.0 or newer";
    case CudaFeature::kFloat8:
      return "needs compute capability 8.9 or newer, which converts FP8; use bf16, or a CPU to try a recipe";
    case CudaFeature::kBulkCopy:
    case CudaFeature::kCluster:
    case CudaFeature::kDependentLaunch:
      return "needs compute capability 9.0 or newer";
    case CudaFeature::kWgmma:
      return "needs compute capability 9.0, whose matrix instructions it is written in";
    case CudaFeature::kTensorMemory:
      return "needs compute capability 10.x, whose matrix instructions it is written in";
  }
  return nullptr;
}

void set_pretended_capability(int number) {
  const auto is_row = [&](const CudaCapability& row) { return row.number == number; };
  KP_CHECK(number == 0 || std::any_of(std::begin(kCudaCapabilities), std::end(kCudaCapabilities), is_row),
           "capability: ", number, " is none that is known; use 80, 86, 89, 90, 100 or 120");
  KP_CHECK(number == 0 || !options().amd, "capability: KERNEL_PYTORCH_AMD=1 is set, and an AMD GPU is no sm_", number);
  pretended = number;
}

int pretended_capability() {
  return pretended;
}

void pretend(DeviceInfo& device) {
  if (pretended == 0 || !device.is_cuda() || device.is_amd() || device.device.index >= kDevices) return;
  actual[device.device.index] = device.cuda.capability();
  const CudaCapability row = cuda_capability(pretended);
  const auto lower = [](int64_t& bytes, int kib) { bytes = std::min<int64_t>(bytes, int64_t{kib} << 10); };
  lower(device.cuda.shared_bytes_per_block, row.shared_kib_per_block);
  lower(device.cuda.shared_bytes_per_multiprocessor, row.shared_kib_per_multiprocessor);
  device.cuda.compute_major = pretended / 10;
  device.cuda.compute_minor = pretended % 10;
}

int actual_capability(const DeviceInfo& device) {
  const int known = device.device.index < kDevices ? actual[device.device.index].load() : 0;
  return known == 0 ? device.cuda.capability() : known;
}

CompileTarget compile_target(int pretended_as, int actual_number) {
  if (pretended_as > actual_number) return {actual_number, false};
  return {pretended_as, pretended_as / 10 != actual_number / 10};
}

}  // namespace kernel_pytorch
