// What the host sides of CUDA kernels share: the table that makes a warm launch a look-up, names of types for name
// expressions, and the reasons for which a kernel passes.
#pragma once

#include <array>
#include <atomic>
#include <string_view>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/device_code.h"

struct CUkern_st;

namespace kernel_pytorch {

CUkern_st* load_kernel(const DeviceCode& code, const Context& context);

// Loaded kernels by device and a small index; a miss asks jit and remembers. Devices beyond the table always ask.
template <int kEntries>
class KernelTable {
 public:
  template <class MakeCode>
  CUkern_st* get(int entry, const Context& context, const MakeCode& make_code) {
    const int device = context.info->device.index;
    if (device >= kDevices) return load_kernel(make_code(), context);
    std::atomic<CUkern_st*>& slot = kernels_[device * kEntries + entry];
    CUkern_st* kernel = slot.load(std::memory_order_acquire);
    if (kernel == nullptr) [[unlikely]] {
      kernel = load_kernel(make_code(), context);
      slot.store(kernel, std::memory_order_release);
    }
    return kernel;
  }

 private:
  static constexpr int kDevices = 16;
  std::array<std::atomic<CUkern_st*>, kDevices * kEntries> kernels_{};
};

inline constexpr DType kCudaTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr int cuda_type_index(DType dtype) {
  return dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 1 : dtype == DType::kFloat16 ? 2 : -1;
}

inline constexpr const char* kNeedsSmallFloat = "takes fp32, bf16 and fp16; fp64 runs on the CPU";

// Null, or why no CUDA kernel takes this device, or rows of this type. What newer kernels need is a feature_obstacle.
inline const char* cuda_obstacle(const DeviceInfo& device) {
  return feature_obstacle(device, CudaFeature::kMma);
}
inline const char* cuda_obstacle(DType dtype, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return obstacle;
  return cuda_type_index(dtype) < 0 ? kNeedsSmallFloat : nullptr;
}

// The same for kernels that convert to or from FP8. Products are by mma on 8.9 and 12.x, by wgmma on 9.0, by tcgen05 on
// 10.x: a kernel of one of these asks for it itself.
inline const char* float8_obstacle(const DeviceInfo& device) {
  return feature_obstacle(device, CudaFeature::kFloat8);
}

inline int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

std::string_view element_type_name(DType dtype);  // "kernel_pytorch::tile::BFloat16"
std::string_view bool_name(bool value);

// Null, or why the tensor cannot be read as 16-byte vectors by row. Absent tensors can.
const char* vector_access_obstacle(const TensorView& view);
const char* parameter_obstacle(const TensorView& parameter);

}  // namespace kernel_pytorch
