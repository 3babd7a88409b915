// What tests of CUDA words share: memory on the device, and a fixture that launches a probe kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch {

template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    memory_ = cuda_device::allocate(0, std::max<size_t>(bytes(), 16));
    cuda_device::copy_to_device(0, memory_, values.data(), bytes(), nullptr);
  }
  ~OnDevice() { cuda_device::release(0, memory_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() const { return static_cast<T*>(memory_); }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    cuda_device::copy_to_host(0, values.data(), memory_, bytes(), nullptr);
    cuda_device::synchronize(0, nullptr);
    return values;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }
  size_t count_;
  void* memory_ = nullptr;
};

class CudaPrimitivesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
    if (!jit::nvrtc_info().found) GTEST_SKIP() << jit::nvrtc_info().absence;
    if (device_info({DeviceKind::kCuda, 0}).cuda.capability() < 90) GTEST_SKIP() << "needs compute capability 9.0";
  }
  template <class... Arguments>
  void launch_code(const DeviceCode& code, const cuda_device::LaunchShape& shape, const Arguments&... arguments) {
    OwnContext context({DeviceKind::kCuda, 0});
    CUkern_st* kernel = jit::get_kernel(code, *context->info, context->stream);
    void* pointers[] = {const_cast<Arguments*>(&arguments)...};
    cuda_device::launch(context, kernel, shape, pointers, code.entry);
  }
};

inline cuda_device::LaunchShape shape_of(unsigned blocks, unsigned threads, unsigned cluster = 1,
                                         unsigned shared_bytes = 0) {
  cuda_device::LaunchShape shape;
  shape.grid_x = blocks;
  shape.block_x = threads;
  shape.cluster_x = cluster;
  shape.shared_bytes = shared_bytes;
  return shape;
}

}  // namespace kernel_pytorch
