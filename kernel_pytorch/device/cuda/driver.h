// The CUDA driver API by dlopen (or HIP's, hip_driver.h), in our own declarations: no toolkit header, no link
// dependency. With no driver everything says so and nothing fails. All calls work in the device's primary context,
// shared with torch and JAX.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_info.h"

struct CUctx_st;
struct CUlib_st;
struct CUkern_st;
struct CUevent_st;
struct CUstream_st;

namespace kernel_pytorch::cuda_device {

// Devices in driver order, empty with no driver (then `absence` says why).
std::vector<DeviceInfo> detect(std::string& absence);

// Makes the device's primary context current for the calling thread while it lives (and retains it for good). A thread
// without a context keeps this one afterwards.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  bool pushed_ = false;
};

// A loaded cubin (cuLibraryLoadData: one load serves every context) and a function of it.
class Module {
 public:
  Module(std::span<const char> cubin, const std::string& label);  // label names it in errors
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  CUkern_st* kernel(const std::string& lowered_name) const;

 private:
  CUlib_st* library_ = nullptr;
  std::string label_;
};

// Loads the function onto the device now rather than at its first launch, which may be inside a capture.
void load_now(CUkern_st* kernel, int device_index, const std::string& label);

struct LaunchShape {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned block_x = 1;
  unsigned cluster_x = 1;     // 1: no cluster
  unsigned shared_bytes = 0;  // dynamic; raised above the default limit where needed
  // May start before the kernel ahead of it in the stream ends (griddepcontrol), on devices that can.
  bool programmatic_dependent = false;
};

// Launches on the context's stream. `label` ("rms_norm/cluster threads=256") is named in the error.
void launch(const Context& context, CUkern_st* kernel, const LaunchShape& shape, std::span<void*> arguments,
            const std::string& label);

// Blocks of this kernel that fit on one multiprocessor at once.
int resident_blocks(CUkern_st* kernel, int device_index, unsigned block_threads, unsigned shared_bytes);

KP_EXPORT bool is_capturing(void* stream);

// Registers, local memory and so on of a loaded kernel, for tests and reports.
struct KernelResources {
  int registers = 0;
  int local_bytes = 0;
  int static_shared_bytes = 0;
};
KernelResources resources(CUkern_st* kernel, int device_index);

// Memory, streams and events for callers without a framework: tuning, benchmarks, tests, the command line.
KP_EXPORT void* allocate(int device_index, size_t bytes);  // throws kDevice naming the bytes asked for and free
KP_EXPORT void release(int device_index, void* memory) noexcept;
KP_EXPORT void copy_to_device(int device_index, void* target, const void* source, size_t bytes, void* stream);
KP_EXPORT void copy_to_host(int device_index, void* target, const void* source, size_t bytes, void* stream);
KP_EXPORT void copy_on_device(int device_index, void* target, const void* source, size_t bytes, void* stream);
KP_EXPORT void fill_bytes(int device_index, void* target, unsigned char value, size_t bytes, void* stream);
KP_EXPORT void synchronize(int device_index, void* stream);

class KP_EXPORT Stream {
 public:
  explicit Stream(int device_index);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* handle() const { return handle_; }

 private:
  int device_index_;
  void* handle_ = nullptr;
};

class KP_EXPORT Event {
 public:
  explicit Event(int device_index);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(void* stream);
  void synchronize();
  float milliseconds_since(const Event& start) const;

 private:
  int device_index_;
  CUevent_st* handle_ = nullptr;
};

}  // namespace kernel_pytorch::cuda_device
