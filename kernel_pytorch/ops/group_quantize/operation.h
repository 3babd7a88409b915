// Quantising by groups and back as the registry sees them, and the kernels that their lists name.
#pragma once

#include "kernel_pytorch/ops/group_quantize/group_quantize.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::group_quantize {

void check(const Quantize& problem, Device device);
void check(const Dequantize& problem, Device device);

extern const registry::Operation<Quantize> kQuantize;
extern const registry::Operation<Dequantize> kDequantize;
extern const registry::Kernel<Quantize> kQuantizeReference, kQuantizeCpu, kQuantizeCuda;
extern const registry::Kernel<Dequantize> kDequantizeReference, kDequantizeCpu, kDequantizeCuda;

}  // namespace kernel_pytorch::group_quantize
