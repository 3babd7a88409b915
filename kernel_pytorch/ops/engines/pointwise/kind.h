// The functions of the pointwise ops and their names, for the contracts of ops.
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::pointwise {

// In the order of Kind.
inline constexpr std::string_view kKindWords = "gelu gelu_tanh silu relu relu_squared sigmoid tanh identity";

}  // namespace kernel_pytorch::pointwise
