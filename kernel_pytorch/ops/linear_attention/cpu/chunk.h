// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why).
//
// Tokens go by chunks of at most kChunk. G is the sum of gates from the chunk's first token on, per token (scalar), or
// per token and column. Of one head:
//
//   P = tril(Qa Ka^T) (times e^(G_t - G_s), scalar);  output = P V + Qi S;  S' = e^(G_last) S + Ki^T V
//
// with Qi = q e^G and Ki = k e^(G_last - G). Scalar gates: Qa = q, Ka = k. Per column: Qa = q e^(G - m) and
// Ka = k e^(m - G), where m is half of G_last; a chunk ends where G of some column leaves +-kMostRange, so that both
// exponentials stay numbers of fp32 whose products are as exact as q k.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::linear_attention {

inline constexpr int64_t kChunk = 48;  // a multiple of the rows of a register tile (cpu/tile_product.h)
inline constexpr float kMostRange = 64.0f;
// Taken for every gate below: e^kLeastGate is 0 in fp32, and sums stay exact for the gates behind it.
inline constexpr float kLeastGate = -104.0f;

// One head's rows of a tensor; token t begins t * stride elements behind `data`.
struct Rows {
  void* data = nullptr;  // null: absent
  int64_t stride = 0;
  bool is_float = false;  // else of the query's type
};
struct Head {
  Rows query{}, key{}, value{}, gate{}, channel_gate{}, grad_output{};
  float decay = 0, scale = 1;
  bool has_scalar = false;  // a gate or a decay
  int64_t columns = 0, values = 0;
};
struct Gradients {
  Rows query{}, key{}, value{}, gate{}, channel_gate{};
  double* decay = nullptr;  // added to
};

// States are rows of kLanes-padded values; state_floats is their size.
struct ChunkKernels {
  int64_t (*workspace_floats)(int64_t columns, int64_t values);
  int64_t (*state_floats)(int64_t columns, int64_t values);
  void (*read_state)(const float* from, int64_t columns, int64_t values, float* state);  // null: zeros
  void (*write_state)(const float* state, int64_t columns, int64_t values, float* to);
  // state = e^log_factors state + more.
  void (*join_states)(const float* log_factors, const float* more, int64_t columns, int64_t values, float* state);
  // Where the chunk that begins here ends.
  int64_t (*chunk_end)(const Head& head, int64_t begin, int64_t end);
  // Tokens of one chunk: output rows where wanted, then the state behind them. The chunk's gates are added to
  // log_total, where that is given.
  void (*advance)(const Head& head, int64_t begin, int64_t end, float* state, const Rows& output, float* log_total,
                  float* workspace);
  // The same tokens one after another: for so few that a chunk does not pay.
  void (*step)(const Head& head, int64_t begin, int64_t end, float* state, const Rows& output, float* workspace);
  // The state's gradient in front of a chunk, of that behind it.
  void (*retreat)(const Head& head, int64_t begin, int64_t end, float* state_gradient, float* log_total,
                  float* workspace);
  // The same with the gradients of what the chunk reads.
  void (*differentiate)(const Head& head, int64_t begin, int64_t end, const float* state_before, float* state_gradient,
                        const Gradients& gradients, float* workspace);
};

// By type: fp32, bf16, fp16.
inline constexpr int kTypesCount = 3;
KP_EACH_CPU_LEVEL(extern const ChunkKernels kChunkKernels[kTypesCount];)
#if defined(__x86_64__)
namespace isa_v4bf16 {
extern const ChunkKernels kBFloat16ChunkKernels;  // its products are of operands rounded to bf16
}
#endif

}  // namespace kernel_pytorch::linear_attention
