#include "kernel_pytorch/device/cpu/arm_level.h"

#include <initializer_list>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::cpu_device {
namespace {

constexpr bool has_bits(uint64_t word, std::initializer_list<int> bits) {
  for (int bit : bits) {
    if ((word >> bit & 1) == 0) return false;
  }
  return true;
}

struct ArmPart {
  uint64_t implementer, part;
  const char* name;
};
constexpr ArmPart kArmParts[] = {
    {0x41, 0xd03, "Arm Cortex-A53"},   {0x41, 0xd07, "Arm Cortex-A57"},  {0x41, 0xd08, "Arm Cortex-A72"},
    {0x41, 0xd0b, "Arm Cortex-A76"},   {0x41, 0xd0c, "Arm Neoverse-N1"}, {0x41, 0xd40, "Arm Neoverse-V1"},
    {0x41, 0xd49, "Arm Neoverse-N2"},  {0x41, 0xd4f, "Arm Neoverse-V2"}, {0x41, 0xd84, "Arm Neoverse-V3"},
    {0x46, 0x001, "Fujitsu A64FX"},    {0x61, 0x022, "Apple M1"},        {0x61, 0x023, "Apple M1"},
    {0xc0, 0xac3, "Ampere AmpereOne"},
};

}  // namespace

// Bit numbers as in Linux's asm/hwcap.h for arm64.
CpuIsa arm_level(const ArmFeatures& features) {
  const bool has_v8_2 = has_bits(features.capabilities, {7 /*CRC32*/, 8 /*ATOMICS*/, 12 /*ASIMDRDM*/, 16 /*DCPOP*/});
  if (!has_v8_2 || !has_bits(features.capabilities, {20 /*ASIMDDP*/})) return CpuIsa::kNeon;
  if (!has_bits(features.more_capabilities, {13 /*I8MM*/, 14 /*BF16*/})) return CpuIsa::kNeonDot;
  const bool has_sve = has_bits(features.capabilities, {9 /*FPHP*/, 10 /*ASIMDHP*/, 22 /*SVE*/}) &&
                       has_bits(features.more_capabilities, {12 /*SVEBF16*/});
  return has_sve && features.sve_vector_bytes == 32 ? CpuIsa::kSve256 : CpuIsa::kNeonBf16;
}

std::string arm_name(uint64_t implementer, uint64_t part) {
  for (const ArmPart& known : kArmParts) {
    if (known.implementer == implementer && known.part == part) return known.name;
  }
  return concat("arm64 processor, implementer ", implementer, " part ", part);
}

}  // namespace kernel_pytorch::cpu_device
