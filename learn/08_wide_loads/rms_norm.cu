// Step 8: rms_norm with 16 bytes per access, the row in registers, and sums by shuffles.
//
// Eight elements per load instead of one: eight times as many bytes are on their way at once, which is enough to fill
// the memory's bandwidth. The row is read from memory once and stays in registers. A warp adds its 32 sums without
// shared memory; shared memory only carries one sum per warp.
#include "../support/device.cuh"

__device__ inline float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;  // the same in every lane
}

__device__ inline float block_sum(float value) {
  __shared__ float of_warps[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  return warp_sum(lane < warps ? of_warps[lane] : 0.0f);
}

struct Eight {
  float values[8];
};
__device__ inline Eight load(const uint16_t* p) {
  const uint4 words = *reinterpret_cast<const uint4*>(p);
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  Eight result;
  for (int i = 0; i < 8; ++i) result.values[i] = from_bf16(static_cast<uint16_t>(word[i / 2] >> i % 2 * 16));
  return result;
}
__device__ inline void store(uint16_t* p, const Eight& eight) {
  uint32_t word[4];
  for (int i = 0; i < 4; ++i) {
    word[i] = to_bf16(eight.values[2 * i]) | static_cast<uint32_t>(to_bf16(eight.values[2 * i + 1])) << 16;
  }
  *reinterpret_cast<uint4*>(p) = uint4{word[0], word[1], word[2], word[3]};
}

// blockDim.x * 8 == columns
extern "C" __global__ void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int columns, float eps) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * columns + threadIdx.x * 8;
  Eight row = load(x + at);
  const Eight factors = load(weight + threadIdx.x * 8);
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += row.values[i] * row.values[i];
  const float scale = rsqrtf(block_sum(sum) / columns + eps);
  for (int i = 0; i < 8; ++i) row.values[i] *= scale * factors.values[i];
  store(y + at, row);
}
