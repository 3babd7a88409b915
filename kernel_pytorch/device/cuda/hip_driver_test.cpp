// What a machine without an AMD GPU shows: that ROCm's library has every function that we ask for.
#include "kernel_pytorch/device/cuda/hip_driver.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::cuda_device {
namespace {

// Sanitizers leave out what compiles by its name: the library is not instrumented.
TEST(HipDriver, TheLibraryThatCompilesHasEveryFunction) {
  void* library = open_hip();
  if (library == nullptr) GTEST_SKIP() << "no libamdhip64 on this machine";
  DriverTable table;
  EXPECT_STREQ(resolve_hip(library, table), nullptr);
#define KP_EXPECT_FUNCTION(member, symbol, hip_symbol, parameters) EXPECT_NE(table.member, nullptr) << symbol;
  KP_DRIVER_FUNCTIONS(KP_EXPECT_FUNCTION)
#undef KP_EXPECT_FUNCTION
  EXPECT_EQ(table.driver_version(&table.version), kSuccess);
  EXPECT_GE(table.version, 5000);
}

}  // namespace
}  // namespace kernel_pytorch::cuda_device
