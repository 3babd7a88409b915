#include "../support/check.h"
#include EXERCISES

// A barrier as the hardware has it: completed phases are counted, and wait(parity) asks for the last one's parity.
struct Barrier {
  long completed = 0;
  bool is_over(int parity) const { return (completed - 1 & 1) == parity; }
};

// The producer runs as far ahead as it may, then the consumer takes one, for a few rounds.
bool ring_works() {
  for (int stages : {1, 2, 3, 4}) {
    std::vector<Barrier> full(stages), empty(stages);
    long produced = 0;
    for (long consumed = 0; consumed < 5 * stages; ++consumed) {
      while (produced < consumed + stages + 2 && empty[produced % stages].is_over(empty_parity(produced, stages))) {
        if (produced >= consumed + stages) return false;  // it would overwrite what was not read
        ++full[produced++ % stages].completed;
      }
      if (produced <= consumed || !full[consumed % stages].is_over(full_parity(consumed, stages))) return false;
      if (produced != consumed + stages) return false;  // it did not use the whole ring
      ++empty[consumed % stages].completed;
    }
  }
  return true;
}

int main() {
  check::exercise(1, "parities of a ring", ring_works(), "round = use / stages; the producer is one phase behind");
  check::exercise(
      2, "stages",
      stages_that_fit(128, 256, 64, 2, 232448, 64) == 4 && stages_that_fit(128, 128, 64, 2, 232448, 1024) == 7,
      "(m + n) * depth * element_bytes per stage");
  check::exercise(
      3, "waves",
      check::near(predicted_seconds(8192, 8192, 8192, 128, 256, 132, 7e14), 16 * 132 * 2.0 * 128 * 256 * 8192 / 7e14) &&
          check::near(predicted_seconds(100, 100, 64, 128, 256, 132, 1e14), 132 * 2.0 * 128 * 256 * 64 / 1e14),
      "whole tiles in whole waves");
  return check::result();
}
