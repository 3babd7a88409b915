// What the host side of the CPU kernels and the code built per instruction level share: plain values, no functions.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::moe_routing {

// Some tokens, chosen for: their weights and experts, and what they add to the counts and the losses.
struct ChooseTask {
  const void* logits = nullptr;  // of the first token
  int64_t stride = 0;            // from a token to the next, in elements
  const float* bias = nullptr;
  int64_t tokens = 0, experts = 0, k = 0;
  int64_t groups = 1, group_k = 1, group_top = 2;
  bool is_sigmoid = false, renormalize = true;
  float scale = 1;
  float* weights = nullptr;
  int32_t* chosen = nullptr;
  int32_t* counts = nullptr;  // [experts], added to
  float* shares = nullptr;    // likewise
  double z_sum = 0;           // likewise
};

struct GradientTask {
  const void* logits = nullptr;
  int64_t stride = 0;
  int64_t tokens = 0, experts = 0, k = 0;
  bool is_sigmoid = false, renormalize = true;
  float scale = 1;
  const float* grad_weights = nullptr;  // null: zeros
  const int32_t* chosen = nullptr;
  const int32_t* rows = nullptr;
  const float* of_shares = nullptr;  // [experts]: the gradient of every token's share; null: zeros
  float of_square = 0;               // the gradient of every token's squared lse
  void* grad_logits = nullptr;       // dense
};

struct RowKernels {
  void (*choose)(ChooseTask& task) = nullptr;
  void (*differentiate)(const GradientTask& task) = nullptr;
};
// fp32, bf16, fp16.
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[3];)

}  // namespace kernel_pytorch::moe_routing
