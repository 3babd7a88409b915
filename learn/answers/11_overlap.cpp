// Step 11, answers.
#include <algorithm>

double exponentials_over_products(int head_size, double flops, double exps) {
  return (1 / exps) / (4.0 * head_size / flops);
}

double predicted_seconds(double products, double exponentials, bool overlapped) {
  return overlapped ? std::max(products, exponentials) : products + exponentials;
}

int consumer_registers(int consumers, int producer) {
  return std::min(240, (65536 / 128 - producer) / consumers / 8 * 8);
}
