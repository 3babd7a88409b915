// Machines made of bits: a level is given only when every instruction of it is there and the system saves its
// registers.
#include "kernel_pytorch/device/cpu/x86_level.h"

#include <gtest/gtest.h>

#include <vector>

namespace kernel_pytorch::cpu_device {
namespace {

constexpr uint32_t bits(std::initializer_list<int> numbers) {
  uint32_t word = 0;
  for (int number : numbers) word |= 1u << number;
  return word;
}

constexpr uint64_t kSseState = 3, kAvxState = 7, kAvx512State = 0xe7, kAmxState = 0x600e7;

X86Registers sapphire_rapids() {
  return {.leaf1_ecx = bits({0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29}),
          .leaf7_ebx = bits({3, 5, 8, 16, 17, 28, 30, 31}),
          .leaf7_edx = bits({22, 24, 25}),
          .leaf7_1_eax = bits({5}),
          .extended1_ecx = bits({0, 5}),
          .tile_palettes = 1,
          .enabled_state = kAmxState};
}

TEST(X86Level, WholeMachine) {
  EXPECT_EQ(x86_level(sapphire_rapids(), true), CpuIsa::kX86V4Amx);
  EXPECT_EQ(x86_level(sapphire_rapids(), false), CpuIsa::kX86V4Bf16) << "no permission for tiles";
  EXPECT_EQ(x86_level({}, true), CpuIsa::kX86V2);
  EXPECT_FALSE(has_x86_v2({}));
}

TEST(X86Level, WhatTheSystemSavesLimitsTheLevel) {
  X86Registers registers = sapphire_rapids();
  registers.enabled_state = kAvx512State;
  EXPECT_EQ(x86_level(registers, true), CpuIsa::kX86V4Bf16);
  EXPECT_FALSE(has_amx_bits(registers));
  registers.enabled_state = kAvxState;
  EXPECT_EQ(x86_level(registers, true), CpuIsa::kX86V3);
  registers.enabled_state = kAvxState | 0x60;  // one of the three AVX-512 states missing
  EXPECT_EQ(x86_level(registers, true), CpuIsa::kX86V3);
  registers.enabled_state = kSseState;
  EXPECT_EQ(x86_level(registers, true), CpuIsa::kX86V2);
  registers.enabled_state = 0;
  EXPECT_EQ(x86_level(registers, true), CpuIsa::kX86V2);
}

TEST(X86Level, EveryInstructionOfALevelIsNeeded) {
  const auto level_without = [](uint32_t X86Registers::*word, int bit) {
    X86Registers registers = sapphire_rapids();
    registers.*word &= ~(1u << bit);
    return x86_level(registers, true);
  };
  for (int bit : {12, 22, 27, 28, 29}) EXPECT_EQ(level_without(&X86Registers::leaf1_ecx, bit), CpuIsa::kX86V2) << bit;
  for (int bit : {3, 5, 8}) EXPECT_EQ(level_without(&X86Registers::leaf7_ebx, bit), CpuIsa::kX86V2) << bit;
  EXPECT_EQ(level_without(&X86Registers::extended1_ecx, 5), CpuIsa::kX86V2);
  for (int bit : {16, 17, 28, 30, 31}) EXPECT_EQ(level_without(&X86Registers::leaf7_ebx, bit), CpuIsa::kX86V3) << bit;
  EXPECT_EQ(level_without(&X86Registers::leaf7_1_eax, 5), CpuIsa::kX86V4);
  for (int bit : {22, 24, 25}) EXPECT_EQ(level_without(&X86Registers::leaf7_edx, bit), CpuIsa::kX86V4Bf16) << bit;
  for (int bit : {0, 9, 13, 19, 20, 23}) EXPECT_EQ(level_without(&X86Registers::leaf1_ecx, bit), CpuIsa::kX86V2) << bit;
}

}  // namespace
}  // namespace kernel_pytorch::cpu_device
