// Codes of gradients as the registry sees them, and the kernels that their lists name.
#pragma once

#include "kernel_pytorch/ops/gradient_code/gradient_code.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::gradient_code {

void check(const Encode& problem, Device device);
void check(const Decode& problem, Device device);

extern const registry::Operation<Encode> kEncode;
extern const registry::Operation<Decode> kDecode;
extern const registry::Kernel<Encode> kEncodeReference, kEncodeCpu, kEncodeCuda;
extern const registry::Kernel<Decode> kDecodeReference, kDecodeCpu, kDecodeCuda;

// Of a message.
inline int64_t columns_of(const TensorView& scales, Code code) {
  return scales.sizes[1] * block_elements(code);
}
inline int64_t tiles_of(int64_t count) {
  return (count + kTile - 1) / kTile;
}

}  // namespace kernel_pytorch::gradient_code
