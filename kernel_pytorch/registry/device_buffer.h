// Memory of our own for trials: on the host or on a CUDA device, 256-byte aligned.
#pragma once

#include <cstddef>

#include "kernel_pytorch/base/device.h"

namespace kernel_pytorch::registry {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device device, size_t bytes);  // throws kDevice when out of memory
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Ordered with the stream; the host side is free again when the call returns.
  void copy_from_host(const void* source, void* stream) const;
  void copy_to_host(void* target, void* stream) const;
  void fill(unsigned char value, void* stream) const;

 private:
  Device device_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kernel_pytorch::registry
