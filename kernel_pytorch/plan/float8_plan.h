// Whether a linear layer is worth training in FP8: what its step takes in bf16 and in FP8, predicted from its shape,
// and in words why. A step is three products of 2 m n k each, and in FP8 the casts of x, of the weight and of the
// gradient, which cost memory traffic and launches. Rates are fractions of what the device can do, measured on an H200.
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
  bool pays = false;
  double bf16_us = 0, float8_us = 0;  // of forward and backward; 0 where the device has no FP8 units
  std::string reason;
};

KP_EXPORT Recipe recipe_of(std::string_view word);  // "delayed", "current", "rowwise", "blockwise"
KP_EXPORT Float8Plan plan_float8(const LinearShape& shape, Recipe recipe, const DeviceInfo& device);

}  // namespace kernel_pytorch::plan
