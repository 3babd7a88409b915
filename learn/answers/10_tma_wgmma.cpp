// Step 10, answers.

int full_parity(long use, int stages) {
  return use / stages % 2;
}
int empty_parity(long use, int stages) {
  return 1 - use / stages % 2;
}

int stages_that_fit(int m, int n, int depth, int element_bytes, int memory, int reserved) {
  return (memory - reserved) / ((m + n) * depth * element_bytes);
}

double predicted_seconds(long m, long n, long k, long tile_m, long tile_n, int multiprocessors, double rate) {
  const long tiles = ((m + tile_m - 1) / tile_m) * ((n + tile_n - 1) / tile_n);
  const long waves = (tiles + multiprocessors - 1) / multiprocessors;
  return waves * (2.0 * tile_m * tile_n * k) / (rate / multiprocessors);
}
