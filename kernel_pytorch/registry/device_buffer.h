// Memory of our own for trials: on the host or on a CUDA device, 256-byte aligned, and a scratch that is used again for
// every run of a trial instead of growing with them.
#pragma once

#include <cstddef>
#include <vector>

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/device/context.h"

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

class RepeatedScratch final : public Scratch {
 public:
  explicit RepeatedScratch(Device device) : device_(device) {}
  void* allocate(size_t bytes) override;
  void begin_run() { next_ = 0; }  // what the last run had may be handed out again

 private:
  Device device_;
  std::vector<DeviceBuffer> blocks_;
  size_t next_ = 0;
};

}  // namespace kernel_pytorch::registry
