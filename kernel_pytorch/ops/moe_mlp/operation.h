// The mixture's MLPs as the registry sees them: compositions of grouped products with two ops of their own.
#pragma once

#include "kernel_pytorch/ops/moe_mlp/moe_mlp.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::moe_mlp {

// Throw what the ops throw. Afterwards sizes of 1 have the strides of a dense tensor.
void check(Combine& problem, Device device);
void check(CombineBackward& problem, Device device);
void check(ActivationBackward& problem, Device device);
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);

void compose(const Forward& problem, Context& context);
void compose(const Backward& problem, Context& context);
registry::Parts parts_of(const Forward& problem, const DeviceInfo& device);
registry::Parts parts_of(const Backward& problem, const DeviceInfo& device);

extern const registry::Operation<Combine> kCombine;
extern const registry::Operation<CombineBackward> kCombineBackward;
extern const registry::Operation<ActivationBackward> kActivationBackward;
extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Combine> kCombineCuda, kCombineCpu, kCombineReference;
extern const registry::Kernel<CombineBackward> kCombineBackwardCuda, kCombineBackwardCpu, kCombineBackwardReference;
extern const registry::Kernel<ActivationBackward> kActivationBackwardCuda, kActivationBackwardCpu,
    kActivationBackwardReference;

}  // namespace kernel_pytorch::moe_mlp
