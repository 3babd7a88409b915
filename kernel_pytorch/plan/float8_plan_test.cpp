#include "kernel_pytorch/plan/float8_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

TEST(Float8Plan, SaysWhichLayersPay) {
  DeviceInfo hopper;
  hopper.device = {DeviceKind::kCuda, 0};
  hopper.cuda.compute_major = 9;
  hopper.cuda.multiprocessors = 132;
  for (Recipe recipe : {Recipe::kDelayed, Recipe::kCurrent, Recipe::kRowwise, Recipe::kBlockwise}) {
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
