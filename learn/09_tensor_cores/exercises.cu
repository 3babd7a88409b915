// Step 9, exercises. Copy this file, solve it, and run: kpt learn 9 --check mine.cu
// The check runs your kernels thread by thread on the CPU, so you need no GPU.
#include "kernel_pytorch/cuda/ptx/mma.cuh"

// Exercise 1: row and column of sum i (0 to 3) of a lane in the 16 x 8 result of mma.m16n8k16: sums 0 and 1 are
// neighbours in row lane / 4, sums 2 and 3 are eight rows below; four lanes share a row.
__device__ int sum_row(int lane, int i) {
  (void)lane, (void)i;
  return 0;
}
__device__ int sum_column(int lane, int i) {
  (void)lane, (void)i;
  return 0;
}

// Exercise 2: c[16][8] = a[16][16] b[8][16]^T by one warp with one mma. a and b are bf16, two per 32-bit word: word
// (row, k / 2). A lane's words of a: rows lane / 4 and lane / 4 + 8 at k / 2 = lane % 4, then both at lane % 4 + 4. Its
// words of b: row lane / 4 at k / 2 = lane % 4 and lane % 4 + 4.
__global__ void multiply(const uint32_t* a, const uint32_t* b, float* c) {
  (void)a, (void)b, (void)c;
}

// Exercise 3: where 16-byte unit `unit` (0 to 7) of row `row` lies, counted in units inside its row of 128 bytes, so
// that eight neighbouring rows' units of one number lie in eight different groups of banks.
__device__ int swizzled_unit(int row, int unit) {
  (void)row;
  return unit;
}
