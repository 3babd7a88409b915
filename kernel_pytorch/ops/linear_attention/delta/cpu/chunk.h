// What crosses from the host side of the delta rule's CPU kernels to the code built per instruction level.
//
// Tokens go by the chunks of linear attention (../../cpu/chunk.h has G, Qa, Ka, Qi, Ki and where a chunk ends). With
// N = -k e^(G - m) and Ng = -k e^G, the values of linear attention are here those of a triangular system, which is
// solved row by row of tiles (A is strictly lower):
//
//   A = N Ka^T (times e^(G_t - G_s), scalar);  W = V + Ng S + A U;  U = beta W
//   P = tril(Qa Ka^T);  output = P U + Qi S;  S' = e^(G_last) S + Ki^T U
#pragma once

#include "kernel_pytorch/ops/linear_attention/cpu/chunk.h"

namespace kernel_pytorch::linear_attention::delta {

struct DeltaHead : Head {
  Rows beta{};
  bool normalizes = false;
};
struct DeltaGradients : Gradients {
  Rows beta{};
};

struct DeltaKernels {
  int64_t (*workspace_floats)(int64_t columns, int64_t values);
  int64_t (*step_floats)(int64_t columns);
  int64_t (*state_floats)(int64_t columns, int64_t values);
  void (*read_state)(const float* from, int64_t columns, int64_t values, float* state);  // null: zeros
  void (*write_state)(const float* state, int64_t columns, int64_t values, float* to);
  int64_t (*chunk_end)(const Head& head, int64_t begin, int64_t end);
  // Tokens of one chunk: output rows where wanted, then the state behind them.
  void (*advance)(const DeltaHead& head, int64_t begin, int64_t end, float* state, const Rows& output,
                  float* workspace);
  // Tokens one after another, from a state as callers store it to another place or the same; either may be null.
  void (*step)(const DeltaHead& head, int64_t begin, int64_t end, const float* from, float* to, const Rows& output,
               float* workspace);
  // The state's gradient in front of a chunk, of that behind it, and the gradients of what the chunk reads.
  void (*differentiate)(const DeltaHead& head, int64_t begin, int64_t end, const float* state_before,
                        float* state_gradient, const DeltaGradients& gradients, float* workspace);
};

// By type: fp32, bf16, fp16.
KP_EACH_CPU_LEVEL(extern const DeltaKernels kDeltaKernels[kTypesCount];)
#if defined(__x86_64__)
namespace isa_v4bf16 {
extern const DeltaKernels kBFloat16DeltaKernels;
}
#endif

}  // namespace kernel_pytorch::linear_attention::delta
