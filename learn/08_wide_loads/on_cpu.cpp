// Step 8's kernel on a CPU, thread by thread: whether it is right, not how fast it is.
#include "cuda.h"

#include "rms_norm.cu"

#include "../support/rms_norm_on_cpu.h"

int main() {
  return compare_on_cpu(8, kColumns / 8, rms_norm);
}
