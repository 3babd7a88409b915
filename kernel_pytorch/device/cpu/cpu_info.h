// Detection of the CPU: instruction level by cpuid and by what the operating system enables, caches, cores.
#pragma once

#include <string>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_device {

DeviceInfo detect();

// Asks the operating system for AMX tile state (arch_prctl); permission holds for the whole process and its children.
// True if tiles may be used. Detection calls it, so a machine_isa of kX86V4Amx means it was granted.
bool request_amx_permission();

}  // namespace kernel_pytorch::cpu_device
