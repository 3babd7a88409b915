// Random data for trials, the same on every machine: approximately normal floats, small integers.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::registry {

// Fills host memory. Floats have mean 0 and variance 1 (a sum of four uniforms, so |x| < 3.5), but the input named
// "rstd" is positive, as a reciprocal deviation is. Integers lie in [0, 7], booleans in [0, 1].
KP_EXPORT void fill_random(void* data, DType dtype, int64_t elements, std::string_view name, uint64_t seed,
                           Threads* threads);

}  // namespace kernel_pytorch::registry
