// What host and device agree on for the routing on CUDA: how tokens are cut, and the arguments of the kernels.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::moe_routing {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kGradientThreads = 256;
// Of the first launch, with so many experts of a lane: fewer where their registers are many.
KP_SHARED_CODE constexpr int choose_threads(int experts_per_lane) {
  return experts_per_lane > 16 ? 256 : experts_per_lane > 8 ? 512 : 1024;
}
inline constexpr int kCandidates = 32;  // a warp's, of which it ranks each against all

// Block b of both launches has the tokens [b * block_tokens, (b + 1) * block_tokens).
struct ForwardArguments {
  const void* logits;
  int64_t row_stride;
  const float* bias;  // null: none
  int32_t tokens, experts, k;
  int32_t groups, group_k, group_top;
  int32_t capacity;  // 0: none
  int32_t block_tokens, blocks;
  bool is_sigmoid, renormalize;
  float scale;
  float* weights;
  int32_t* chosen;
  int32_t* offsets;
  int32_t* counts;
  int32_t* token_of_row;
  int32_t* row_of_token;
  int32_t* dropped;
  float* aux_loss;
  float* z_loss;
  // What the first launch leaves for the second: [blocks, experts] twice, and [blocks].
  int32_t* block_counts;
  float* block_shares;
  float* block_squares;
};

struct BackwardArguments {
  const void* logits;
  int64_t row_stride;
  int32_t tokens, experts, k;
  bool is_sigmoid, renormalize;
  float scale;
  const float* grad_weights;  // null: zeros, as the next two
  const float* grad_aux_loss;
  const float* grad_z_loss;
  const int32_t* chosen;
  const int32_t* counts;
  const int32_t* row_of_token;
  void* grad_logits;
};

// Bytes of shared memory: candidates of each warp, then counts of all experts, a float of each expert and warp (keys of
// groups, then shares), and one of each warp.
KP_SHARED_CODE constexpr int choose_shared_bytes(int experts, int warps) {
  return warps * kCandidates * 12 + experts * 4 + warps * experts * 4 + warps * 4;
}
// Of each expert: earlier pairs, all pairs, its first row; ranks of each warp.
KP_SHARED_CODE constexpr int place_shared_bytes(int experts) {
  return experts * (3 + kWarps) * 4;
}

}  // namespace kernel_pytorch::moe_routing
