/* Normalises a small matrix on the CPU with rms_norm and checks it against the formula; then asks for something that
 * the library refuses, to show how errors come back. Exit status 0 when all is as expected.
 *
 *   gcc -std=c11 normalise.c -I INCLUDE LIBRARY/libkernel_pytorch.so -Wl,-rpath,LIBRARY -lm -o normalise */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernel_pytorch/c/kernel_pytorch.h"

enum { kRows = 64, kColumns = 1000 };
static const double kEps = 1e-5;

static float x_values[kRows * kColumns], weight_values[kColumns], output_values[kRows * kColumns];

static double largest_difference(void) {
  double worst = 0;
  for (int row = 0; row < kRows; ++row) {
    const float* x = x_values + row * kColumns;
    double squares = 0;
    for (int i = 0; i < kColumns; ++i) squares += (double)x[i] * x[i];
    for (int i = 0; i < kColumns; ++i) {
      const double expected = x[i] / sqrt(squares / kColumns + kEps) * weight_values[i];
      worst = fmax(worst, fabs(output_values[row * kColumns + i] - expected));
    }
  }
  return worst;
}

int main(void) {
  for (int i = 0; i < kRows * kColumns; ++i) x_values[i] = sinf((float)i);
  for (int i = 0; i < kColumns; ++i) weight_values[i] = 1.0f + 0.001f * (float)i;

  kp_context* context = NULL;
  const kp_device cpu = {KP_CPU, 0};
  if (kp_context_create(cpu, NULL, &context) != KP_OK) {
    fprintf(stderr, "%s\n", kp_last_error());
    return 2;
  }

  const int64_t sizes[] = {kRows, kColumns}, columns[] = {kColumns};
  const kp_tensor x = {.data = x_values, .dtype = KP_FLOAT32, .device = cpu, .rank = 2, .sizes = sizes};
  const kp_tensor weight = {.data = weight_values, .dtype = KP_FLOAT32, .device = cpu, .rank = 1, .sizes = columns};
  const kp_tensor output = {.data = output_values, .dtype = KP_FLOAT32, .device = cpu, .rank = 2, .sizes = sizes};
  kp_status status = KP_CALL(context, "rms_norm", kp_tensor_argument("x", &x), kp_tensor_argument("weight", &weight),
                             kp_number_argument("eps", kEps), kp_tensor_argument("output", &output));
  if (status != KP_OK) {
    fprintf(stderr, "%s\n", kp_last_error());
    kp_context_destroy(context);
    return 2;
  }
  const double worst = largest_difference();
  printf("largest difference from the formula: %.1e\n", worst);

  status = KP_CALL(context, "rms_norm", kp_tensor_argument("x", &x), kp_number_argument("eps", -1),
                   kp_tensor_argument("output", &output));
  printf("refused: %s\n", kp_last_error());
  kp_context_destroy(context);
  return worst < 1e-5 && status == KP_INVALID_ARGUMENT && strstr(kp_last_error(), "eps") != NULL ? 0 : 1;
}
