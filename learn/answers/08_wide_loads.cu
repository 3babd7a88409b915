// Step 8, answers.

__device__ float warp_maximum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, mask);
    value = other > value ? other : value;
  }
  return value;
}

__global__ void copy(const float* from, float* to, int count) {
  for (int i = threadIdx.x; i < count / 4; i += blockDim.x) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int i = count / 4 * 4 + threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

int row_distance() {
  return 33;
}
