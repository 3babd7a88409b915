// Encodes what the copy engine (cp.async.bulk.tensor, sm_90) has to know of a tensor: address, sizes, strides, and the
// box that one instruction moves. Boxes are written to shared memory with the swizzle of their rows, and what lies
// outside the tensor reads as zero.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::cuda_device {

// Null, or why no map can describe the view: the last dimension must be dense, the address and every other stride a
// multiple of 16 bytes.
const char* tensor_map_obstacle(const TensorView& view);

// Encodes a tensor of up to five dimensions with fp32, 16-bit or one-byte elements; coordinates count them from the
// last to the first. The box takes `box_rows` (at most 256) of dimension rank - 2, `box_groups` of the one before it
// and `box_bytes` of the last one: 128 or 64.
// `words` are 128 bytes at a multiple of 64. Throws kDevice with the driver's answer.
void encode_tensor_map(const TensorView& view, int box_rows, uint64_t (&words)[16], int box_groups = 1,
                       int box_bytes = 128);

}  // namespace kernel_pytorch::cuda_device
