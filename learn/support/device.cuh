// What the first CUDA steps share: bf16 in plain arithmetic, and shared memory whose size the launch gives.
#include "kernel_pytorch/base/fixed_width.h"

__device__ inline float from_bf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ inline uint16_t to_bf16(float value) {  // to nearest even
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#ifdef __CUDACC_RTC__
#define LAUNCHED_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#else  // support/on_cpu
#define LAUNCHED_SHARED_MEMORY(name) alignas(1024) static unsigned char name[232448]
#endif
