// What holds on every machine: absence is a text, never an error, and calls without a driver say why they fail.
#include "kernel_pytorch/device/cuda/driver.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/device/cuda/launch_counts.h"

namespace kernel_pytorch::cuda_device {
namespace {

TEST(CudaDriver, DevicesAreDescribedOrTheirAbsenceIs) {
  std::string absence = "old";
  const std::vector<DeviceInfo> found = detect(absence);
  if (found.empty()) {
    EXPECT_TRUE(absence.starts_with("no CUDA device: ")) << absence;
    return;
  }
  EXPECT_EQ(absence, "");
  for (size_t i = 0; i < found.size(); ++i) {
    const DeviceInfo& info = found[i];
    EXPECT_EQ(info.device, (Device{DeviceKind::kCuda, static_cast<int16_t>(i)}));
    EXPECT_FALSE(info.name.empty());
    EXPECT_TRUE(info.cuda.capability() >= 50 || info.is_amd());
    EXPECT_GT(info.cuda.multiprocessors, 0);
    EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
    EXPECT_GE(info.cuda.shared_bytes_per_block, 48 << 10);
    EXPECT_GE(info.cuda.shared_bytes_per_multiprocessor, info.cuda.shared_bytes_per_block);
    EXPECT_GT(info.cuda.l2_bytes, 0);
    EXPECT_GE(info.cuda.driver_version, info.is_amd() ? 5000 : 12000);
    EXPECT_TRUE(info.fingerprint.starts_with(info.name + (info.is_amd() ? "|gfx" : "|sm_"))) << info.fingerprint;
    EXPECT_NE(info.fingerprint_hash, 0u);
  }
}

TEST(CudaDriver, CanBeSwitchedOff) {
  const Options saved = options();
  Options off = saved;
  off.disable_cuda = true;
  set_options_for_process(off);
  std::string absence;
  const bool empty = detect(absence).empty();
  set_options_for_process(saved);
  EXPECT_TRUE(empty);
  EXPECT_EQ(absence, "no CUDA device: switched off by KERNEL_PYTORCH_DISABLE_CUDA");
}

TEST(CudaDriver, WithoutADriverCallsSayWhy) {
  if (driver() != nullptr) GTEST_SKIP() << "this machine has a driver";
  EXPECT_FALSE(is_capturing(nullptr));
  release(0, nullptr);
  try {
    allocate(0, 16);
    FAIL() << "memory of a device that is not there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_EQ(error.message(), driver_absence());
  }
}

TEST(CudaDriver, FillsAreCounted) {
  const LaunchCounts before = launch_counts();
  std::string absence;
  if (detect(absence).empty()) {
    EXPECT_EQ(before.kernels + before.fills, 0u);
    return;
  }
  void* memory = allocate(0, 64);
  fill_bytes(0, memory, 1, 64, nullptr);
  fill_bytes(0, memory, 2, 0, nullptr);  // nothing is handed to the driver
  synchronize(0, nullptr);
  release(0, memory);
  const LaunchCounts counted = launch_counts() - before;
  EXPECT_EQ(counted.fills, 1u);
  EXPECT_EQ(counted.kernels, 0u);
}

}  // namespace
}  // namespace kernel_pytorch::cuda_device
