#include "kernel_pytorch/plan/float8_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr Recipe kRecipes[] = {Recipe::kDelayed, Recipe::kCurrent, Recipe::kRowwise, Recipe::kBlockwise};

DeviceInfo gpu(int major, int minor) {
  DeviceInfo info;
  info.device = {DeviceKind::kCuda, 0};
  info.cuda.compute_major = major;
  info.cuda.compute_minor = minor;
  info.cuda.multiprocessors = 132;
  return info;
}

// What each capability does with a layer that pays on an H200. Only 9.0 has the instructions of sm90_wgmma; FP8
// conversions and mma begin with 8.9.
struct Expected {
  int major, minor;
  bool runs, pays;
  const char* kernel;
  const char* reason;
};
constexpr Expected kCapabilities[] = {
    {7, 5, false, false, "", "needs compute capability 8.0 or newer"},
    {8, 0, false, false, "", "needs compute capability 8.9"},
    {8, 6, false, false, "", "needs compute capability 8.9"},
    {8, 7, false, false, "", "needs compute capability 8.9"},
    {8, 9, true, false, "cuda_mma", "a GPU of compute capability 8.9 multiplies codes by cuda_mma"},
    {9, 0, true, true, "sm90_wgmma", "in FP8"},
    {10, 0, true, false, "cuda_mma", "a GPU of compute capability 10.0 multiplies codes by cuda_mma"},
    {10, 3, true, false, "cuda_mma", "was not measured"},
    {12, 0, true, false, "cuda_mma", "was not measured"},
    {12, 1, true, false, "cuda_mma", "was not measured"},
};

TEST(Float8Plan, SaysWhatRunsOnEveryCapability) {
  for (const Expected& expected : kCapabilities) {
    for (const Recipe recipe : kRecipes) {
      const Float8Plan plan = plan_float8({8192, 4096, 14336}, recipe, gpu(expected.major, expected.minor));
      EXPECT_EQ(plan.runs, expected.runs) << expected.major << "." << expected.minor << " " << plan.reason;
      EXPECT_EQ(plan.pays, expected.pays) << expected.major << "." << expected.minor << " " << plan.reason;
      EXPECT_EQ(plan.kernel, expected.kernel) << expected.major << "." << expected.minor;
      EXPECT_NE(plan.reason.find(expected.reason), std::string::npos) << plan.reason;
      EXPECT_EQ(plan.bf16_us > 0, expected.pays) << plan.reason;
    }
  }
  for (const Recipe recipe : kRecipes) {
    const Float8Plan plan = plan_float8({8192, 4096, 14336}, recipe, device_info(Device{}));
    EXPECT_TRUE(plan.runs && !plan.pays) << plan.reason;
    EXPECT_NE(plan.reason.find("the CPU has no product of FP8 here"), std::string::npos) << plan.reason;
  }
}

// Odd sizes have codes in padded rows: they run wherever round ones do, and are never said to pay.
TEST(Float8Plan, OddSizesRunToo) {
  for (const Expected& expected : kCapabilities) {
    for (const LinearShape& shape : {LinearShape{1, 1, 1}, LinearShape{7, 33, 17}, LinearShape{100, 4096, 1000}}) {
      const Float8Plan plan = plan_float8(shape, Recipe::kBlockwise, gpu(expected.major, expected.minor));
      EXPECT_EQ(plan.runs, expected.runs) << plan.reason;
      EXPECT_FALSE(plan.pays) << plan.reason;
    }
  }
  EXPECT_EQ(plan_float8({100, 4096, 1000}, Recipe::kDelayed, gpu(9, 0)).kernel, "sm90_wgmma");
  EXPECT_EQ(plan_float8({100, 4096, 1001}, Recipe::kDelayed, gpu(9, 0)).kernel, "cuda_mma");
}

TEST(Float8Plan, SaysWhichLayersPay) {
  const DeviceInfo hopper = gpu(9, 0);
  for (const Recipe recipe : kRecipes) {
    const Float8Plan large = plan_float8({8192, 4096, 14336}, recipe, hopper);
    EXPECT_TRUE(large.pays) << large.reason;
    EXPECT_GT(large.bf16_us, large.float8_us);
    const Float8Plan small = plan_float8({512, 256, 256}, recipe, hopper);
    EXPECT_FALSE(small.pays) << small.reason;
    EXPECT_NE(small.reason.find("not worth it"), std::string::npos) << small.reason;
  }
  EXPECT_LT(plan_float8({8192, 4096, 14336}, Recipe::kDelayed, hopper).float8_us,
            plan_float8({8192, 4096, 14336}, Recipe::kCurrent, hopper).float8_us);
  EXPECT_NE(plan_float8({8192, 4096, 1000}, Recipe::kDelayed, hopper).reason.find("multiples of 16"),
            std::string::npos);
  const Float8Plan on_cpu = plan_float8({8192, 4096, 14336}, Recipe::kDelayed, device_info(Device{}));
  EXPECT_FALSE(on_cpu.pays);
  EXPECT_NE(on_cpu.reason.find("decoded and multiplied in fp32"), std::string::npos);
  EXPECT_THROW(plan_float8({0, 1, 1}, Recipe::kDelayed, hopper), Error);
  EXPECT_EQ(recipe_of("blockwise"), Recipe::kBlockwise);
  EXPECT_THROW(recipe_of("blocks"), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
