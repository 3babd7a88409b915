#include "kernel_pytorch/device/cpu/x86_level.h"

#include <initializer_list>

namespace kernel_pytorch::cpu_device {
namespace {

constexpr bool has_all(uint64_t word, std::initializer_list<int> bits) {
  for (int bit : bits) {
    if ((word >> bit & 1) == 0) return false;
  }
  return true;
}

// Bit numbers as in Intel's manual, volume 2, CPUID.
bool has_x86_v3(const X86Registers& registers) {
  return has_all(registers.leaf1_ecx, {12 /*FMA*/, 22 /*MOVBE*/, 27 /*OSXSAVE*/, 28 /*AVX*/, 29 /*F16C*/}) &&
         has_all(registers.leaf7_ebx, {3 /*BMI1*/, 5 /*AVX2*/, 8 /*BMI2*/}) &&
         has_all(registers.extended1_ecx, {5 /*LZCNT*/}) && has_all(registers.enabled_state, {1 /*XMM*/, 2 /*YMM*/});
}

bool has_x86_v4(const X86Registers& registers) {
  return has_all(registers.leaf7_ebx, {16 /*F*/, 17 /*DQ*/, 28 /*CD*/, 30 /*BW*/, 31 /*VL*/}) &&
         has_all(registers.enabled_state, {5 /*masks*/, 6 /*ZMM upper halves*/, 7 /*ZMM16-31*/});
}

}  // namespace

bool has_x86_v2(const X86Registers& registers) {
  return has_all(registers.leaf1_ecx,
                 {0 /*SSE3*/, 9 /*SSSE3*/, 13 /*CX16*/, 19 /*SSE4.1*/, 20 /*SSE4.2*/, 23 /*POPCNT*/}) &&
         has_all(registers.extended1_ecx, {0 /*LAHF*/});
}

bool has_amx_bits(const X86Registers& registers) {
  return has_all(registers.leaf7_edx, {22 /*BF16*/, 24 /*TILE*/, 25 /*INT8*/}) &&
         has_all(registers.enabled_state, {17 /*tile config*/, 18 /*tile data*/});
}

CpuIsa x86_level(const X86Registers& registers, bool amx_granted) {
  if (!has_x86_v2(registers) || !has_x86_v3(registers)) return CpuIsa::kX86V2;
  if (!has_x86_v4(registers)) return CpuIsa::kX86V3;
  if (!has_all(registers.leaf7_1_eax, {5 /*AVX512_BF16*/})) return CpuIsa::kX86V4;
  return amx_granted && has_amx_bits(registers) ? CpuIsa::kX86V4Amx : CpuIsa::kX86V4Bf16;
}

}  // namespace kernel_pytorch::cpu_device
