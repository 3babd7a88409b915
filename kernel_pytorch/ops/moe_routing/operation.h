// moe_routing as the registry sees it. In a checked problem every output is there and contiguous, logits have a dense
// last dimension.
#pragma once

#include "kernel_pytorch/ops/moe_routing/moe_routing.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::moe_routing {

inline constexpr double kLeastSum = 1e-20;  // of scores that weights are divided by

// Throw what the ops throw.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);
void check(Permute& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Operation<Permute> kPermute;
extern const registry::Kernel<Forward> kForwardCuda, kForwardCpu, kForwardReference;
extern const registry::Kernel<Backward> kBackwardCuda, kBackwardCpu, kBackwardReference;
extern const registry::Kernel<Permute> kPermuteCuda, kPermuteCpu, kPermuteReference;

}  // namespace kernel_pytorch::moe_routing
