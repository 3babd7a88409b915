#include "kernel_pytorch/ops/engines/expression/tiles.h"

#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::expression {

template <>
const TileKernels<float>& tile_kernels<float>(CpuIsa isa) {
  return KP_AT_CPU_LEVEL(isa, kTileKernels);
}

template <>
const TileKernels<double>& tile_kernels<double>(CpuIsa isa) {
  return KP_AT_CPU_LEVEL(isa, kTileKernelsDouble);
}

}  // namespace kernel_pytorch::expression
