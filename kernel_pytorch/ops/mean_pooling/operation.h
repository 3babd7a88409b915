// The two poolings as the registry sees them, and the kernels that their lists name. A problem's x (or grad_input) is
// [batch, tokens, inner, columns], its output (or grad_output) [batch, means, inner, columns], contiguous.
#pragma once

#include <algorithm>

#include "kernel_pytorch/ops/mean_pooling/mean_pooling.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::mean_pooling {

// Throw what the ops throw; leave the problem as described above. The second pair is chunk_mean_pool's.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);
void check_chunks(Forward& problem, Device device);
void check_chunks(Backward& problem, Device device);

extern const registry::Operation<Forward> kForward, kChunkForward;
extern const registry::Operation<Backward> kBackward, kChunkBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda;

// Sizes of a problem in one place.
struct Sizes {
  int64_t batch = 0, tokens = 0, inner = 0, columns = 0;
  int64_t means = 0;  // of each batch
  int64_t chunk = 0;  // tokens of a mean where there are no offsets

  Sizes(const TensorView& x, const TensorView& offsets, int64_t chunk_size)
      : batch(x.sizes[0]), tokens(x.sizes[1]), inner(x.sizes[2]), columns(x.sizes[3]) {
    // A chunk longer than all tokens ends with them.
    chunk = chunk_size > 0 ? std::min(chunk_size, std::max<int64_t>(tokens, 1)) : tokens;
    means = offsets.is_present() ? offsets.sizes[0] - 1 : chunk_size > 0 ? (tokens + chunk - 1) / chunk : 1;
  }
  int64_t rows() const { return batch * means * inner; }
};

// Tokens of one mean, on the host.
struct Range {
  int64_t begin = 0, end = 0;
};
Range range_of(const Sizes& sizes, const TensorView& offsets, int64_t mean);

}  // namespace kernel_pytorch::mean_pooling
