// From what Linux says of an arm64 processor (the auxiliary vector, the length of SVE's vectors) to an instruction
// level: a pure function, so that machines we do not have are tested too. A level names every feature that its kernels
// are compiled for (cmake/isa_variants.cmake).
#pragma once

#include <cstdint>
#include <string>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_device {

struct ArmFeatures {
  uint64_t capabilities = 0;       // AT_HWCAP
  uint64_t more_capabilities = 0;  // AT_HWCAP2
  int64_t sve_vector_bytes = 0;    // of this process; 0 without SVE
};

// kSve256 is for vectors of exactly 32 bytes: its kernels are compiled for that length. Shorter ones are no gain over
// NEON, and a machine with longer ones (Fugaku's A64FX) runs NEON.
CpuIsa arm_level(const ArmFeatures& features);

// "Arm Neoverse-V1" from the fields "CPU implementer" and "CPU part" of /proc/cpuinfo; numbers for one we do not know.
std::string arm_name(uint64_t implementer, uint64_t part);

}  // namespace kernel_pytorch::cpu_device
