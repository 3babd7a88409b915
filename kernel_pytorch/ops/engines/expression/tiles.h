// Score and mask functions (kernel_pytorch/expression) by tiles on the CPU: which of the per-level kernels a machine
// runs.
#pragma once

#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/expression/tile.h"

namespace kernel_pytorch::expression {

// Real: float or double.
template <class Real>
const TileKernels<Real>& tile_kernels(CpuIsa isa);

}  // namespace kernel_pytorch::expression
