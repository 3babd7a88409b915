// Shapes that layer_norm is tested and measured on.
#pragma once

#include <vector>

#include "kernel_pytorch/ops/row_norm/row_norm_shapes.h"

namespace kernel_pytorch::layer_norm {

inline std::vector<registry::ProblemRequest> shapes() {
  return row_norm::shapes();
}

}  // namespace kernel_pytorch::layer_norm
