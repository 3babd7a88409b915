// What each CUDA compute capability has: the one table that kernels' `supports` ask, that tests walk, and that
// `kpt verify --as` takes the limits of a capability from. Facts of NVIDIA's programming guide (technical
// specifications per compute capability) and of the PTX manual (target notes of the instructions).
#pragma once

#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch {

enum class CudaFeature {
  kMma,              // bf16, fp16 and TF32 mma, fp64 mma, cp.async: 8.0
  kFloat8,           // conversions to and from e4m3 and e5m2, products by mma: 8.9
  kBulkCopy,         // mbarrier transactions, cp.async.bulk and tensor maps: 9.0
  kCluster,          // thread block clusters and their shared memory: 9.0
  kDependentLaunch,  // griddepcontrol: 9.0
  kWgmma,            // warpgroup products and setmaxnreg of sm_90a: 9.0 alone
  kTensorMemory,     // tcgen05 of sm_100a, sm_103a, sm_110a: 10.x and 11.0 alone
};

struct CudaCapability {
  int number;                         // 86
  int shared_kib_per_block;           // the opt-in limit of one block
  int shared_kib_per_multiprocessor;  // one of these is reserved for each block
  int threads_per_multiprocessor;
  int cluster_blocks;  // most of one, beyond the portable 8 where that is documented; 1: no clusters
  bool float8;
  bool hopper;         // bulk copies, clusters, dependent launches
  bool wgmma;          // with the suffix a
  bool tensor_memory;  // with the suffix a
};

inline constexpr CudaCapability kCudaCapabilities[] = {
    {75, 64, 64, 1024, 1, false, false, false, false},    //
    {80, 163, 164, 2048, 1, false, false, false, false},  // A100
    {86, 99, 100, 1536, 1, false, false, false, false},   // RTX 30, A10, A40
    {87, 163, 164, 1536, 1, false, false, false, false},  // Orin
    {89, 99, 100, 1536, 1, true, false, false, false},    // RTX 40, L4, L40
    {90, 227, 228, 2048, 16, true, true, true, false},    // H100, H200
    {100, 227, 228, 2048, 16, true, true, false, true},   // B200
    {103, 227, 228, 2048, 16, true, true, false, true},   // B300
    {110, 227, 228, 1536, 8, true, true, false, true},    // Thor
    {120, 99, 100, 1536, 8, true, true, false, false},    // RTX 50
    {121, 99, 100, 1536, 8, true, true, false, false},    // GB10
};

// What kernels may use on an AMD GPU: what kernel_pytorch/hip has a form of. A block has 64 KiB of shared memory (LDS),
// without asking.
inline constexpr CudaCapability kAmdGpu = {89, 64, 64, 2048, 1, true, false, false, false};

// The row of a capability; of one that the table does not know the nearest before it, without what is of that one
// alone.
KP_EXPORT CudaCapability cuda_capability(int number);

KP_EXPORT int most_cluster_blocks(const DeviceInfo& device);
KP_EXPORT bool has_feature(const DeviceInfo& device, CudaFeature feature);
// Null, or why a device has it not.
KP_EXPORT const char* feature_obstacle(const DeviceInfo& device, CudaFeature feature);

// Devices found from now on say that they are of this capability, with its limits where theirs are wider: kernels are
// chosen and compiled as for it. To be called before the first device is asked for; 0: as they are.
KP_EXPORT void set_pretended_capability(int number);
KP_EXPORT int pretended_capability();
KP_EXPORT void pretend(DeviceInfo& device);  // as set

// What code of a pretended capability is compiled for on a device: its own architecture where the device runs it (the
// same major number), PTX for an older one, the device's for a newer one. `actual` is the device's own capability.
struct CompileTarget {
  int capability = 0;
  bool as_ptx = false;
};
KP_EXPORT CompileTarget compile_target(int pretended, int actual);
KP_EXPORT int actual_capability(const DeviceInfo& device);

}  // namespace kernel_pytorch
