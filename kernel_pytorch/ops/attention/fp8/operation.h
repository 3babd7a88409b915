// Attention in FP8 as the registry sees it. In a problem every tensor is [batch, heads, sequence, size] by its strides,
// and `scale` has a value.
#pragma once

#include "kernel_pytorch/ops/attention/fp8/fp8.h"
#include "kernel_pytorch/ops/attention/problem.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::attention::fp8 {

extern const registry::Operation<Forward> kForward;
extern const registry::Kernel<Forward> kSm90, kRounded, kReference;

// Throws what forward() throws; leaves the problem as described above.
void check(Forward& problem, Device device);

// The same problem of attention, on operands that are rounded already.
ForwardProblem attention_of(const Forward& problem, const TensorView& query, const TensorView& key,
                            const TensorView& value);
// What a rotation makes of the softmax scale, and of the size of queries and keys.
double scale_of(const Forward& problem);
int64_t size_of_rounded(const Forward& problem);

}  // namespace kernel_pytorch::attention::fp8
