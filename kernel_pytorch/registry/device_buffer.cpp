#include "kernel_pytorch/registry/device_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"

namespace kernel_pytorch::registry {
namespace {

constexpr size_t kAlignment = 256;

}  // namespace

DeviceBuffer::DeviceBuffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (device.kind == DeviceKind::kCuda) {
    data_ = cuda_device::allocate(device.index, rounded);
    return;
  }
  data_ = std::aligned_alloc(kAlignment, rounded);
  if (data_ == nullptr) fail(ErrorCode::kDevice, "trial: out of memory: ", bytes, " bytes wanted on the host");
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  if (device_.kind == DeviceKind::kCuda) {
    cuda_device::release(device_.index, data_);
  } else {
    std::free(data_);
  }
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(other.device_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceBuffer::copy_from_host(const void* source, void* stream) const {
  if (bytes_ == 0) return;
  if (device_.kind == DeviceKind::kCpu) {
    std::memcpy(data_, source, bytes_);
    return;
  }
  cuda_device::copy_to_device(device_.index, data_, source, bytes_, stream);
  cuda_device::synchronize(device_.index, stream);
}

void DeviceBuffer::copy_to_host(void* target, void* stream) const {
  if (bytes_ == 0) return;
  if (device_.kind == DeviceKind::kCpu) {
    std::memcpy(target, data_, bytes_);
    return;
  }
  cuda_device::copy_to_host(device_.index, target, data_, bytes_, stream);
  cuda_device::synchronize(device_.index, stream);
}

void DeviceBuffer::fill(unsigned char value, void* stream) const {
  if (bytes_ == 0) return;
  if (device_.kind == DeviceKind::kCpu) {
    std::memset(data_, value, bytes_);
  } else {
    cuda_device::fill_bytes(device_.index, data_, value, bytes_, stream);
  }
}

}  // namespace kernel_pytorch::registry
