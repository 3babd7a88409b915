// Linear attention as the registry sees it: its sizes, where sequences lie, and the kernels that its lists name.
#pragma once

#include "kernel_pytorch/ops/linear_attention/linear_attention.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::linear_attention {

struct Sizes {
  int64_t batch, tokens, heads, query_heads, key_heads, columns, values, sequences;

  template <class Problem>
  explicit Sizes(const Problem& problem)
      : batch(problem.value.sizes[0]),
        tokens(problem.value.sizes[1]),
        heads(problem.value.sizes[2]),
        query_heads(problem.query.sizes[2]),
        key_heads(problem.key.sizes[2]),
        columns(problem.query.sizes[3]),
        values(problem.value.sizes[3]),
        sequences(problem.cu_seqlens.is_present() ? problem.cu_seqlens.sizes[0] - 1 : batch) {}
  int64_t query_head(int64_t head) const { return head * query_heads / heads; }
  int64_t key_head(int64_t head) const { return head * key_heads / heads; }
};

// Tokens of a sequence, of offsets that the host may read.
struct Range {
  int64_t batch, begin, end;
  int64_t count() const { return end - begin; }
};
template <class Problem>
Range range_of(const Problem& problem, int64_t sequence) {
  if (!problem.cu_seqlens.is_present()) return {sequence, 0, problem.value.sizes[1]};
  const TensorView& offsets = problem.cu_seqlens;
  const auto at = [&](int64_t i) { return index_at(offsets.data, offsets.dtype == DType::kInt64, i); };
  return {0, at(sequence), at(sequence + 1)};
}

// The state that a sequence reads and writes, of indices that the host may read; -1: none.
template <class Problem>
int64_t slot_of(const Problem& problem, int64_t sequence) {
  if constexpr (requires { problem.state_index; }) {
    if (problem.state_index.is_present()) {
      return index_at(problem.state_index.data, problem.state_index.dtype == DType::kInt64, sequence);
    }
  }
  return sequence;
}

// Throw what the ops throw.
void check(const Forward& problem, Device device);
void check(const Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda, kForwardSm90, kForwardSm90Split;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda, kBackwardSm90,
    kBackwardSm90Split;

}  // namespace kernel_pytorch::linear_attention
