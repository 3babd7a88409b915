// Step 9, answers.
#include "kernel_pytorch/cuda/ptx/mma.cuh"

__device__ int sum_row(int lane, int i) {
  return lane / 4 + i / 2 * 8;
}
__device__ int sum_column(int lane, int i) {
  return lane % 4 * 2 + i % 2;
}

__global__ void multiply(const uint32_t* a, const uint32_t* b, float* c) {
  const int lane = threadIdx.x, row = lane / 4, pair = lane % 4;
  const uint32_t of_a[4] = {a[row * 8 + pair], a[(row + 8) * 8 + pair], a[row * 8 + pair + 4],
                            a[(row + 8) * 8 + pair + 4]};
  float sums[4] = {};
  kernel_pytorch::ptx::mma_m16n8k16_f32_bf16(sums, of_a, b[row * 8 + pair], b[row * 8 + pair + 4]);
  for (int i = 0; i < 4; ++i) c[sum_row(lane, i) * 8 + sum_column(lane, i)] = sums[i];
}

__device__ int swizzled_unit(int row, int unit) {
  return unit ^ (row & 7);
}
