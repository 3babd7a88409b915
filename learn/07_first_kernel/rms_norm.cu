// Step 7: rms_norm on a GPU, one block of threads per row, one element per access.
//
// A thread loads two bytes, waits for them, adds, and only then asks for the next two. So an SM never has more than
// 2,048 threads * 2 bytes on their way from memory: the latency of memory is the roof, not its bandwidth.
#include "../support/device.cuh"

extern "C" __global__ void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int columns, float eps) {
  __shared__ float partial[256];
  x += static_cast<int64_t>(blockIdx.x) * columns;
  y += static_cast<int64_t>(blockIdx.x) * columns;

  float sum = 0;
#pragma unroll 1  // one load at a time, as the page counts them
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const float value = from_bf16(x[i]);
    sum += value * value;
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {  // 256 sums become one
    if (static_cast<int>(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }

  const float scale = rsqrtf(partial[0] / columns + eps);
#pragma unroll 1
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    y[i] = to_bf16(from_bf16(x[i]) * scale * from_bf16(weight[i]));
  }
}
