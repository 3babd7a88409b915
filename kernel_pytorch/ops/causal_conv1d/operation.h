// The causal convolution as the registry sees it, and the kernels that its lists name.
#pragma once

#include "kernel_pytorch/ops/causal_conv1d/causal_conv1d.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::causal_conv1d {

struct Sizes {
  int64_t batch, tokens, channels, width, sequences;

  template <class Problem>
  explicit Sizes(const Problem& problem)
      : batch(problem.x.sizes[0]),
        tokens(problem.x.sizes[1]),
        channels(problem.x.sizes[2]),
        width(problem.weight.sizes[1]),
        sequences(problem.cu_seqlens.is_present() ? problem.cu_seqlens.sizes[0] - 1 : batch) {}
};

// Tokens of a sequence, of offsets that the host may read.
struct Range {
  int64_t batch, begin, end;
};
template <class Problem>
Range range_of(const Problem& problem, int64_t sequence) {
  if (!problem.cu_seqlens.is_present()) return {sequence, 0, problem.x.sizes[1]};
  const TensorView& offsets = problem.cu_seqlens;
  const auto at = [&](int64_t i) { return index_at(offsets.data, offsets.dtype == DType::kInt64, i); };
  return {0, at(sequence), at(sequence + 1)};
}

// Throw what the ops throw.
void check(const Forward& problem, Device device);
void check(const Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda;

}  // namespace kernel_pytorch::causal_conv1d
