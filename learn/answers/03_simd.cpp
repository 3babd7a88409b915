// Step 3, answers.
typedef float Eight __attribute__((vector_size(32), aligned(4)));

void scale(float* x, long count, float factor) {
  long i = 0;
  for (; i + 8 <= count; i += 8) *reinterpret_cast<Eight*>(x + i) *= factor;
  for (; i < count; ++i) x[i] *= factor;
}

float largest(const float* x, long count) {
  Eight most = Eight{} + x[0];
  long i = 0;
  for (; i + 8 <= count; i += 8) {
    const Eight next = *reinterpret_cast<const Eight*>(x + i);
    most = next > most ? next : most;
  }
  float result = x[0];
  for (int lane = 0; lane < 8; ++lane) result = most[lane] > result ? most[lane] : result;
  for (; i < count; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

int chains_needed(int starts, int latency) {
  return starts * latency;
}
