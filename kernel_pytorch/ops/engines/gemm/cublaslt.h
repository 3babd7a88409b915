// NVIDIA's cuBLASLt by dlopen, in our own declarations: a vendor's product that the tuner may hold against ours. It is
// looked for when a kernel is first asked whether it can run on a GPU, and where there is none that is the answer.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::vendor {

// Null, or why cuBLASLt cannot be used, with the cure. Looks again as long as there is none: a framework may bring it.
const char* cublaslt_obstacle(const DeviceInfo& device);

// The first places of the library's own list of algorithms for a problem, best first by its estimate, with its version:
// what was measured with another one is not remembered.
std::vector<std::string> cublaslt_configs();

// output = relu?(alpha a b + bias) + beta residual, row by row; [batch, rows, columns], of each matrix one of the last
// two strides is 1, of residual and output the last. With scales the types are FP8 and alpha is multiplied by both.
struct LtProduct {
  TensorView a{}, b{}, bias{}, residual{}, output{};
  float alpha = 1, beta = 0;
  bool relu = false;  // not with a residual

  bool fast_accumulator = false;  // FP8
  const float* scale_a = nullptr;
  const float* scale_b = nullptr;
};

// By place `choice` of the list, the last where it is shorter. Throws kUnsupported where it is empty, kDevice.
void cublaslt_multiply(const LtProduct& product, int choice, Context& context, const std::string& label);

}  // namespace kernel_pytorch::vendor
