// Random data for trials, the same on every machine: approximately normal floats, indices within their limit.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

// Fills host memory. Normal floats have mean 0 and variance 1 (a sum of four uniforms, so |x| < 3.5), positive ones are
// at least 0.5. Integers lie in [0, limit) or ascend to it, booleans in [0, 1]; seeds have all their bits random.
KP_EXPORT void fill_random(void* data, DType dtype, int64_t elements, const Filling& filling, uint64_t seed,
                           Threads* threads);

}  // namespace kernel_pytorch::registry
