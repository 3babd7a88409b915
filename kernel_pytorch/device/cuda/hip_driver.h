// HIP behind the driver's table: libamdhip64 (ROCm 5.2 and later), whose functions are CUDA's under another name but
// for those that hip_driver.cpp has in their place. Emulated, never run on hardware.
#pragma once

#include "kernel_pytorch/device/cuda/driver_table.h"

namespace kernel_pytorch::cuda_device {

// libamdhip64, the one that the process already has where it has one (torch's); null where there is none.
void* open_hip();
// Fills the table. Returns the first symbol that the library lacks, or null.
const char* resolve_hip(void* library, DriverTable& table);

}  // namespace kernel_pytorch::cuda_device
