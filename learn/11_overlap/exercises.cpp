// Step 11, exercises. Copy this file, solve it, and run: kpt learn 11 --check mine.cpp

// Exercise 1: time of the exponentials over time of the products, for a head of this size. Per score there are
// 4 * head_size FLOPs and one exponential; an SM does `flops` FLOPs and `exps` exponentials per clock.
double exponentials_over_products(int head_size, double flops, double exps) {
  (void)head_size, (void)flops, (void)exps;
  return 0;
}

// Exercise 2: seconds of attention from the seconds of its products and of its exponentials: one after the other, or
// each under the other.
double predicted_seconds(double products, double exponentials, bool overlapped) {
  (void)exponentials, (void)overlapped;
  return products;
}

// Exercise 3: registers per thread of each of `consumers` warpgroups, when an SM has 65,536, a warpgroup has 128
// threads, the one producer warpgroup keeps `producer` per thread, and setmaxnreg takes multiples of 8 up to 240.
int consumer_registers(int consumers, int producer) {
  (void)consumers, (void)producer;
  return 0;
}
