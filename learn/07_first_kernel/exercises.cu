// Step 7, exercises. Copy this file, solve it, and run: kpt learn 7 --check mine.cu
// The check runs your kernels thread by thread on the CPU, so you need no GPU.

// Exercise 1: y[i] = x[i] + 1 for all i < count, launched with any grid: a thread takes every (threads of the grid)th
// element, beginning with its own number.
__global__ void add_one(const float* x, float* y, int count) {
  (void)x, (void)y, (void)count;
}

// Exercise 2: result[blockIdx.x] = the largest of the row's `columns` values; 64 threads per block, columns >= 64.
__global__ void row_maximum(const float* x, float* result, int columns) {
  __shared__ float partial[64];
  partial[threadIdx.x] = x[blockIdx.x * columns + threadIdx.x];
  result[blockIdx.x] = partial[0];
}

// Exercise 3 (Little's law): the bytes per second that can arrive when every thread has one load under way.
double bytes_per_second(int multiprocessors, int threads_each, int bytes_per_load, double latency_seconds) {
  (void)multiprocessors, (void)threads_each, (void)bytes_per_load, (void)latency_seconds;
  return 0;
}
