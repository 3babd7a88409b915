// Step 10, exercises. Copy this file, solve it, and run: kpt learn 10 --check mine.cpp

// Exercise 1: a ring of `stages` barriers. A barrier's phase is 0 at first and flips each time it completes. Use i
// (0, 1, 2, ...) of the ring is of stage i % stages. The parity that the consumer waits for before use i, and the one
// that the producer waits for on the `empty` barrier: wait(parity) returns once the phase of that parity is over, and a
// fresh barrier counts as if the phase of parity 1 were over.
int full_parity(long use, int stages) {
  (void)use, (void)stages;
  return 0;
}
int empty_parity(long use, int stages) {
  (void)use, (void)stages;
  return 0;
}

// Exercise 2: how many stages fit: a stage is a tile of A (m x depth) and one of B (n x depth) of element_bytes each;
// `memory` bytes are there, of which `reserved` are taken.
int stages_that_fit(int m, int n, int depth, int element_bytes, int memory, int reserved) {
  (void)m, (void)n, (void)depth, (void)element_bytes, (void)memory, (void)reserved;
  return 1;
}

// Exercise 3: seconds of an m x n x k product by tiles of tile_m x tile_n, one per SM at a time (the last wave takes as
// long as a full one), if the whole GPU does `rate` FLOPs per second.
double predicted_seconds(long m, long n, long k, long tile_m, long tile_n, int multiprocessors, double rate) {
  (void)tile_m, (void)tile_n, (void)multiprocessors;
  return 2.0 * m * n * k / rate;
}
