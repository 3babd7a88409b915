// From what CPUID and XGETBV answered to an instruction level: a pure function, so that machines we do not have are
// tested too. The levels are the psABI's (x86-64-v2, v3, v4), each demanded whole; a vector level also needs the
// operating system to save its registers (XCR0), which some hypervisors and kernels leave off.
#pragma once

#include <cstdint>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_device {

struct X86Registers {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;    // leaf 7, subleaf 1
  uint32_t extended1_ecx = 0;  // leaf 0x80000001
  uint32_t tile_palettes = 0;  // leaf 0x1D, subleaf 0, EAX: highest palette
  uint64_t enabled_state = 0;  // XCR0; 0 without OSXSAVE
};

bool has_x86_v2(const X86Registers& registers);
bool has_amx_bits(const X86Registers& registers);  // CPUID's and XCR0's; the process still has to ask for permission
CpuIsa x86_level(const X86Registers& registers, bool amx_granted);

}  // namespace kernel_pytorch::cpu_device
