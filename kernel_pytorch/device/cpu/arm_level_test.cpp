// Machines made of bits: a level is given only when every feature of it is there and vectors have its length.
#include "kernel_pytorch/device/cpu/arm_level.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::cpu_device {
namespace {

ArmFeatures neoverse_v1() {
  constexpr uint64_t kV8_2 = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 16, kSve = 1 << 22, kDot = 1 << 20;
  constexpr uint64_t kSveBf16 = 1 << 12, kI8mm = 1 << 13, kBf16 = 1 << 14;
  return {.capabilities = kV8_2 | kSve | kDot, .more_capabilities = kSveBf16 | kI8mm | kBf16, .sve_vector_bytes = 32};
}

TEST(ArmLevel, WholeMachine) {
  EXPECT_EQ(arm_level(neoverse_v1()), CpuIsa::kSve256);
  EXPECT_EQ(arm_level({}), CpuIsa::kNeon);
}

TEST(ArmLevel, OnlyVectorsOfTheCompiledLengthAreSve) {
  ArmFeatures features = neoverse_v1();
  for (const int64_t bytes : {0, 16, 64, 128, 256}) {
    features.sve_vector_bytes = bytes;
    EXPECT_EQ(arm_level(features), CpuIsa::kNeonBf16) << bytes;
  }
}

TEST(ArmLevel, EveryFeatureOfALevelIsNeeded) {
  const auto level_without = [](int bit) {
    ArmFeatures features = neoverse_v1();
    features.capabilities &= ~(uint64_t{1} << bit);
    return arm_level(features);
  };
  for (int bit : {7, 8, 12, 16, 20}) EXPECT_EQ(level_without(bit), CpuIsa::kNeon) << bit;
  for (int bit : {9, 10, 22}) EXPECT_EQ(level_without(bit), CpuIsa::kNeonBf16) << bit;
  ArmFeatures features = neoverse_v1();
  features.more_capabilities &= ~(uint64_t{1} << 12);
  EXPECT_EQ(arm_level(features), CpuIsa::kNeonBf16) << "A64FX has SVE, and no products of bf16";
  for (int bit : {13, 14}) {  // Neoverse N1 has neither
    features = neoverse_v1();
    features.more_capabilities &= ~(uint64_t{1} << bit);
    EXPECT_EQ(arm_level(features), CpuIsa::kNeonDot) << bit;
  }
}

TEST(ArmLevel, Names) {
  EXPECT_EQ(arm_name(0x41, 0xd0c), "Arm Neoverse-N1");
  EXPECT_EQ(arm_name(0x99, 0x12), "arm64 processor, implementer 153 part 18");
}

}  // namespace
}  // namespace kernel_pytorch::cpu_device
