// mlp as the registry sees it: of a checked problem the leading dimensions are merged, [rows, columns], and a
// preactivation is there only with an activation.
#pragma once

#include "kernel_pytorch/ops/mlp/mlp.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::mlp {

// Throw what forward() and backward() throw; leave the problem as described above.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);

void compose(const Forward& problem, Context& context);
void compose(const Backward& problem, Context& context);
registry::Parts parts_of(const Forward& problem, const DeviceInfo& device);
registry::Parts parts_of(const Backward& problem, const DeviceInfo& device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;

}  // namespace kernel_pytorch::mlp
