// Step 3, exercises. Copy this file, solve it, and run: kpt learn 3 --check mine.cpp
// A register of eight floats; + - * and ?: work on all lanes. v[i] is lane i.
typedef float Eight __attribute__((vector_size(32), aligned(4)));

// Exercise 1: x[i] *= factor for count values, eight at a time. What does not fill a register needs care: nothing
// beyond x[count - 1] may be written.
void scale(float* x, long count, float factor) {
  (void)x, (void)count, (void)factor;
}

// Exercise 2: the largest of count values, count >= 1, eight at a time.
float largest(const float* x, long count) {
  (void)x, (void)count;
  return 0;
}

// Exercise 3: how many chains of sums a core needs so that none waits: it can start `starts` multiply-adds per cycle,
// and each takes `latency` cycles.
int chains_needed(int starts, int latency) {
  (void)starts, (void)latency;
  return 1;
}
