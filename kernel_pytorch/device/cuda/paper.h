// Launches on paper: a rehearsal on a GPU that need not be there. While a PaperLaunches lives, its thread compiles and
// loads nothing; what it would launch is written down with the code it would compile. The device of the context has an
// index of its own, kPaperDevice or more: tables of loaded kernels go by it.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch::cuda_device {

inline constexpr int kPaperDevice = 128;  // beyond real ones; with what follows it in the 8 bits that tables give it

struct PaperLaunch {
  DeviceCode code;
  LaunchShape shape;
  std::string label;
};

class KP_EXPORT PaperLaunches {
 public:
  PaperLaunches();
  ~PaperLaunches();
  PaperLaunches(const PaperLaunches&) = delete;
  PaperLaunches& operator=(const PaperLaunches&) = delete;
  static PaperLaunches* current();  // of this thread; null for none

  CUkern_st* load(const DeviceCode& code);  // stands for a kernel for good: some tables keep whatever they are given
  void launch(CUkern_st* kernel, const LaunchShape& shape, const std::string& label);

  const std::vector<PaperLaunch>& launches() const { return launches_; }

 private:
  const Rehearsal rehearsal_;
  PaperLaunches* outer_;
  std::vector<PaperLaunch> launches_;
};

}  // namespace kernel_pytorch::cuda_device
