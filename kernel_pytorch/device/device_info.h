// What a device is: everything that a kernel's `supports` or a heuristic may ask, and the fingerprint that keys
// measurements. Plain values, filled by device/cpu and device/cuda.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

// Instruction levels of the CPU: x86-64's, then arm64's, each containing those of its architecture before it.
enum class CpuIsa : uint8_t { kX86V2, kX86V3, kX86V4, kX86V4Bf16, kX86V4Amx, kNeon, kNeonDot, kNeonBf16, kSve256 };
// "v2", "v3", "v4", "v4bf16", "v4amx", "neon", "neondot", "neonbf16", "sve256"
KP_EXPORT std::string_view name_of(CpuIsa isa);

struct CpuInfo {
  CpuIsa isa = CpuIsa::kX86V2;          // what kernels may use: the machine's, capped by Options::cpu_isa
  CpuIsa machine_isa = CpuIsa::kX86V2;  // what the processor has and the operating system enables
  int cores = 1;                        // that this process may run on
  int64_t l1_data_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t l3_bytes = 0;
  // AMX bits are set but CPUID leaf 0x1D is empty (some virtual machines): our AMX works there, oneDNN inside torch
  // dies with SIGILL on a bf16 matrix product unless ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.
  bool amx_palette_missing = false;
};

struct CudaInfo {
  int compute_major = 0;
  int compute_minor = 0;
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
  int64_t shared_bytes_per_block = 0;  // the opt-in limit
  int64_t shared_bytes_per_multiprocessor = 0;
  int clock_khz = 0;
  int memory_clock_khz = 0;
  int memory_bus_bits = 0;
  int driver_version = 0;  // 13000 for 13.0; HIP's for an AMD GPU
  std::string gfx{};       // "gfx90a": an AMD GPU, whose compute capability is 0.0
  int capability() const { return compute_major * 10 + compute_minor; }  // 90 for an H200
  std::string architecture() const { return gfx.empty() ? "sm_" + std::to_string(capability()) : gfx; }
};

struct DeviceInfo {
  Device device;
  std::string name;
  int64_t memory_bytes = 0;
  CpuInfo cpu;              // of the host, for every device
  CudaInfo cuda;            // zeros for the CPU
  std::string fingerprint;  // "NVIDIA H200|sm_90|132 SMs|139 GiB|driver 13"; "cpu name|v4|caches|cores"
  uint64_t fingerprint_hash = 0;
  bool is_cpu() const { return device.kind == DeviceKind::kCpu; }
  bool is_cuda() const { return device.kind == DeviceKind::kCuda; }  // AMD's GPUs too, as torch calls them
  bool is_amd() const { return !cuda.gfx.empty(); }
};

// The CPU first, then every CUDA device. Found once per process; references stay valid for good.
KP_EXPORT const std::vector<DeviceInfo>& devices();
// Throws kDevice, with why there is none, for a device that is not there.
KP_EXPORT const DeviceInfo& device_info(Device device);
// Why there is no CUDA device ("no CUDA device: libcuda.so.1 not found"), empty where there is one.
KP_EXPORT const std::string& cuda_absence();

}  // namespace kernel_pytorch
