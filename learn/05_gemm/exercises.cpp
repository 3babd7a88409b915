// Step 5, exercises. Copy this file, solve it, and run: kpt learn 5 --check mine.cpp

// Exercise 1: c[4][8] = a[4][k] b[k][8], rows dense, with all 32 sums in variables while k runs. Each number of a and b
// may be read once: A and B count their reads.
template <class A, class B>
void multiply_tile(const A& a, const B& b, float* c, long depth) {
  for (long i = 0; i < 4; ++i) {
    for (long j = 0; j < 8; ++j) {
      c[i * 8 + j] = 0;
      for (long k = 0; k < depth; ++k) c[i * 8 + j] += a[i * depth + k] * b[k * 8 + j];
    }
  }
}

// Exercise 2: pack b[depth][columns] into panels of 8 columns, [columns / 8][depth][8], so that a tile reads it from
// front to back. columns is a multiple of 8.
void pack(const float* b, long depth, long columns, float* panels) {
  (void)b, (void)depth, (void)columns, (void)panels;
}

// Exercise 3: FLOPs per byte loaded (fp32) by a register tile of rows x columns, per step of k.
double intensity(int rows, int columns) {
  (void)rows, (void)columns;
  return 0;
}
