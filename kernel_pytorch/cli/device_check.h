// The self-test of kpt doctor: on each device one op of every family computes a small problem with the kernel that a
// call would get, and is compared with the reference; then a copy measures how fast memory is. Bounded in time.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cli {

struct OpTest {
  std::string op;
  std::string problem;  // "8x64 fp32"
  std::string kernel;   // that was compared; empty where only the reference supports the op on this device
  std::vector<std::string> failures;
};

struct SelfTest {
  std::string device;
  std::vector<OpTest> ops;
  std::vector<std::string> not_reached;  // ops for which the time did not suffice
  double copy_gigabytes_per_second = 0;  // measured now; 0 where it could not be
  double seconds = 0;
  bool passed() const;
};

SelfTest test_device(const DeviceInfo& device);

// rms_norm of rms_norm_forward and rms_norm_backward: the name without its direction.
std::string family_of(const std::string& op);

}  // namespace kernel_pytorch::cli
