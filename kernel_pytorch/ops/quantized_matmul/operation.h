// The product with a weight in few bits as the registry sees it, and the kernels that its list names. In a problem x
// and output are matrices.
#pragma once

#include "kernel_pytorch/ops/quantized_matmul/quantized_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::quantized_matmul {

void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kCudaThin, kCudaStream, kCudaMma, kCudaWgmma, kCudaBits, kCpuIntegers, kCpuDots,
    kCpuThin, kComposed, kReference;

inline constexpr int64_t kThinRows = 16;    // at most, of the kernels for few rows
inline constexpr int64_t kIntegerRows = 4;  // of the one by dot products of 8-bit integers

}  // namespace kernel_pytorch::quantized_matmul
