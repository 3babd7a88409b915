// Whether a linear layer can be trained in FP8 on a device, and whether that is worth it. A step is three products of
// 2 m n k each, and in FP8 the casts of x, of the weight and of the gradient. The plan asks the kernels of those
// products and casts whether they take them on the device; a layer for which one has no kernel does not run. Where the
// products run on FP8 tensor cores, the step in bf16 and in FP8 is predicted from its shape: casts cost memory traffic
// and launches. Rates are fractions of what the device can do, measured on an H200.
#pragma once

#include <string>
#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::plan {

enum class Recipe : uint8_t { kDelayed, kCurrent, kRowwise, kBlockwise };

struct LinearShape {
  int64_t tokens = 0, in_features = 0, out_features = 0;
};

struct Float8Plan {
  bool runs = false;                  // every product and cast of a step has a kernel of this library
  bool pays = false;                  // it runs, and is predicted to be faster than bf16
  double bf16_us = 0, float8_us = 0;  // of forward and backward; 0 where there is no prediction
  std::string kernel;                 // of the slowest of the products; empty where it does not run
  std::string reason;
};

KP_EXPORT Recipe recipe_of(std::string_view word);  // "delayed", "current", "rowwise", "blockwise"
// `device` need not be one of this machine.
KP_EXPORT Float8Plan plan_float8(const LinearShape& shape, Recipe recipe, const DeviceInfo& device);

}  // namespace kernel_pytorch::plan
