// Score and mask functions (kernel_pytorch/expression) on CPU devices: the tile kernels of a CPU level, and a function
// on a whole tensor of scores, for looking at what a traced function does. Attention evaluates tiles by itself.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch {

namespace expression {
template <class Real>
struct TileKernels;
}

// Real: float or double.
template <class Real>
const expression::TileKernels<Real>& tile_kernels(CpuIsa isa);

struct EvaluateExpression {
  std::string program{};    // text
  bool derivative = false;  // d result / d score in place of the result
  TensorView score{};       // fp32 [batch, heads, queries, keys], contiguous, on a CPU
  std::vector<TensorView> captured{};
  TensorView output{};  // score's shape, contiguous: fp32, or bool for a mask function
};
KP_EXPORT void evaluate_expression(const EvaluateExpression& arguments, Context& context);

// The output's type: fp32 or bool.
KP_EXPORT DType result_dtype(const std::string& program);

}  // namespace kernel_pytorch
