// The smallest kernel with everything the compiler path needs: an included header, a Config value as template argument,
// dynamic shared memory and a cluster. Tests compile and launch it; `kpt doctor` can use it to see whether the JIT
// works.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/jit/jit_probe_cuda.h"

namespace kernel_pytorch::jit_probe {

// values[i] = values[i] * factor + kConfig.addend, for i below count.
template <class T, ProbeConfig kConfig>
__global__ void __launch_bounds__(kConfig.threads) scale(T* values, T factor, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kConfig.threads + threadIdx.x;
  for (int64_t i = first; i < count; i += static_cast<int64_t>(gridDim.x) * kConfig.threads) {
    values[i] = values[i] * factor + T(doubled(kConfig.addend)) / T(2);
  }
}

// Each block passes `bytes` of dynamic shared memory; thread 0 writes its first and last byte's sum for the host.
template <ProbeConfig kConfig>
__global__ void touch_shared(int32_t* sums, int32_t bytes) {
  extern __shared__ unsigned char memory[];
  if (threadIdx.x == 0) {
    memory[0] = 3;
    memory[bytes - 1] = 4;
    sums[blockIdx.x] = memory[0] + memory[bytes - 1] + kConfig.addend;
  }
}

// Writes, per block, the number of blocks in its cluster.
template <ProbeConfig kConfig>
__global__ void count_cluster(int32_t* sizes) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) sizes[blockIdx.x] = static_cast<int32_t>(__clusterDim().x) + kConfig.addend;
#endif
}

}  // namespace kernel_pytorch::jit_probe
