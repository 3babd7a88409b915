// Detection of the CPU: instruction level by what the processor has and the operating system enables, caches, cores.
#pragma once

#include <string_view>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_device {

// Everything but the fingerprint. Costs microseconds and touches no GPU driver.
DeviceInfo detect();

// The machine's level, lowered to the named one ("v3"); a name above the machine's level, or empty, changes nothing.
CpuIsa cap_isa(CpuIsa machine, std::string_view cap);

// Asks the operating system for AMX tile state (arch_prctl); permission holds for the whole process and its children.
// True if tiles may be used. Detection calls it, so a machine_isa of kX86V4Amx means it was granted.
bool request_amx_permission();

}  // namespace kernel_pytorch::cpu_device
