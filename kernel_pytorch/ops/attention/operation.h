// attention as the registry sees it: checked arguments and the kernels that compute them.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/attention/problem.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::attention {

// The sizes that every kernel asks for, of checked arguments.
struct Sizes {
  int64_t batch, heads, key_heads, queries, keys, size, value_size;
  int64_t sequences;                   // batch, or those that are packed
  int64_t longest_query, longest_key;  // of a sequence
  int64_t group() const { return key_heads == 0 ? 1 : heads / key_heads; }
};

inline Sizes sizes_of(const TensorView& query, const TensorView& key, const TensorView& value, const Scoring& scoring) {
  Sizes sizes{.batch = query.sizes[0],
              .heads = query.sizes[1],
              .key_heads = key.sizes[1],
              .queries = query.sizes[2],
              .keys = key.sizes[2],
              .size = query.sizes[3],
              .value_size = value.sizes[3],
              .sequences = query.sizes[0],
              .longest_query = query.sizes[2],
              .longest_key = key.sizes[2]};
  if (scoring.is_packed()) {
    sizes.sequences = scoring.cu_seqlens_q.sizes[0] - 1;
    sizes.longest_query = scoring.max_seqlen_q;
    sizes.longest_key = scoring.max_seqlen_k;
  }
  return sizes;
}
template <class Problem>
Sizes sizes_of(const Problem& problem) {
  return sizes_of(problem.query, problem.key, problem.value, problem.scoring);
}

extern const registry::Kernel<ForwardProblem> kForwardCpu, kForwardCpuAmx, kForwardCpuDecode;
extern const registry::Kernel<ForwardProblem> kForwardSm90;
extern const registry::Kernel<ForwardProblem> kForwardReference;
extern const registry::Kernel<BackwardProblem> kBackwardCpu, kBackwardCpuAmx;
extern const registry::Kernel<BackwardProblem> kBackwardReference;

extern const registry::Kernel<ForwardProblem> kForwardCudaDecode;
extern const registry::Kernel<ForwardProblem> kForwardCudaMma;
extern const registry::Kernel<ForwardProblem> kForwardCudaDouble;
extern const registry::Kernel<BackwardProblem> kBackwardCudaDouble;
extern const registry::Kernel<BackwardProblem> kBackwardSm90;
extern const registry::Kernel<BackwardProblem> kBackwardCudaMma;

extern const registry::Operation<ForwardProblem> kForward;
extern const registry::Operation<BackwardProblem> kBackward;

}  // namespace kernel_pytorch::attention
