// linear as the registry sees it: of a checked problem the leading dimensions are merged, [rows, columns], and a
// preactivation is there only with an activation.
#pragma once

#include <functional>

#include "kernel_pytorch/ops/linear/linear.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::linear {

// Throw what forward() and backward() throw; leave the problem as described above.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);

// The GEMMs of a checked problem. `grad` is the gradient of the preactivation.
matmul::Product product_of(const Forward& problem);
// With a weight_up the forward is one product, or those of gates and ups and then gated_activation.
bool is_one_product(const Forward& problem, const DeviceInfo& device);
struct GateAndUp {
  matmul::Product gate, up;
};
GateAndUp gate_and_up_of(const Forward& problem, const TensorView& gate, const TensorView& up);
using ProductVisitor = std::function<void(const matmul::Product&)>;
void visit_products(const Backward& problem, const TensorView& grad, const ProductVisitor& visit);

void compose(const Forward& problem, Context& context);
void compose(const Backward& problem, Context& context);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;

}  // namespace kernel_pytorch::linear
