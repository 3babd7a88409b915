// fp64 on a GPU where an op has no kernel for it: the call is computed on the host, on copies of its tensors. The
// front ends (torch, the C interface and so JAX) make every declared call by call_declared. Right for every op and
// option, and slow: the stream is waited for, and each tensor crosses the bus.
#pragma once

#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/declaration.h"

namespace kernel_pytorch::registry {

KP_EXPORT void call_declared(const Declaration& declaration, ArgumentSource& source);

// Whether the op's fp64 calls on a GPU are computed there: it has kernels for them.
KP_EXPORT bool computes_double_on_gpu(std::string_view op);

}  // namespace kernel_pytorch::registry
