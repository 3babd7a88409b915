// Step 7's kernel on a CPU, thread by thread: whether it is right, not how fast it is.
#include "cuda.h"

#include "rms_norm.cu"

#include "../support/rms_norm_on_cpu.h"

int main() {
  return compare_on_cpu(7, 256, rms_norm);
}
