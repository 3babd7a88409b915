#include "../support/check.h"
#include EXERCISES

int main() {
  check::exercise(1, "two units",
                  check::near(exponentials_over_products(128, 4096, 16), 0.5) &&
                      check::near(exponentials_over_products(64, 4096, 16), 1.0),
                  "(1 / exps) / (4 * head_size / flops): 64 / head_size on Hopper");
  check::exercise(
      2, "overlap",
      predicted_seconds(2, 1, true) == 2 && predicted_seconds(1, 3, true) == 3 && predicted_seconds(2, 1, false) == 3,
      "the sum, or the larger");
  check::exercise(
      3, "registers",
      consumer_registers(2, 40) == 232 && consumer_registers(3, 32) == 160 && consumer_registers(1, 24) == 240,
      "65536 / 128 = 512 are shared by the warpgroups");
  return check::result();
}
