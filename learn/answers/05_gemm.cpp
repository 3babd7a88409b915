// Step 5, answers.

template <class A, class B>
void multiply_tile(const A& a, const B& b, float* c, long depth) {
  float sums[4][8] = {};
  for (long k = 0; k < depth; ++k) {
    float of_b[8];
    for (int j = 0; j < 8; ++j) of_b[j] = b[k * 8 + j];
    for (int i = 0; i < 4; ++i) {
      const float of_a = a[i * depth + k];
      for (int j = 0; j < 8; ++j) sums[i][j] += of_a * of_b[j];
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 8; ++j) c[i * 8 + j] = sums[i][j];
  }
}

void pack(const float* b, long depth, long columns, float* panels) {
  for (long panel = 0; panel < columns / 8; ++panel) {
    for (long k = 0; k < depth; ++k) {
      for (long j = 0; j < 8; ++j) *panels++ = b[k * columns + panel * 8 + j];
    }
  }
}

double intensity(int rows, int columns) {
  return 2.0 * rows * columns / (4.0 * (rows + columns));
}
