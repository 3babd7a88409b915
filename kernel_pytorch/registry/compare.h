// Compares an output with the reference's, element by element, in the terms of tolerance.h. Both on the host.
#pragma once

#include <string>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/registry/tolerance.h"

namespace kernel_pytorch::registry {

// Outputs are filled with this byte before a run: NaN in every float format, so what a kernel leaves out shows.
inline constexpr unsigned char kPoisonByte = 0xff;

// "" when equal, else how many elements differ and the worst of them: "3 of 4096 elements differ; worst at [1, 7]:
// ...". NaN equals NaN; an infinity equals only itself. The views agree in shape and type; strides may differ.
KP_EXPORT std::string compare(const TensorView& actual, const TensorView& reference, const Tolerance& tolerance);

}  // namespace kernel_pytorch::registry
