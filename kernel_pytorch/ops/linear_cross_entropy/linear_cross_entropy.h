// The loss of a language model's head, and its gradients, without the logits: cross_entropy(hidden weight^T, target) by
// chunks of rows. Of each chunk the logits are a product, become their own gradient in place, and are used up by two
// more products; only one chunk of them exists at a time.
//
//   loss = mean over all rows of cross_entropy's row losses (a row that is ignored adds 0 and is counted)
//   grad_hidden, grad_weight: the gradient of that mean
//
// The mean over the rows that count is this times rows / count, which a front end knows how to take; with none ignored
// the factor is 1. Made of matmul and cross_entropy, with their types, strides and errors; it has no kernels of its
// own.
//
// grad_weight is added up over the chunks in its own type, hidden's or fp32: in bf16 each element is rounded once a
// chunk.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"

namespace kernel_pytorch::linear_cross_entropy {

inline constexpr int64_t kChunkBytes = int64_t{252} << 20;  // of logits: with what else a call needs, 256 MB

struct Forward {
  TensorView hidden{};  // [rows, size], the last stride 1
  TensorView weight{};  // [classes, size]; one stride 1
  TensorView target{};  // [rows]
  TensorView class_weight{};
  cross_entropy::Options options{};
  int64_t chunk_bytes = kChunkBytes;
  TensorView loss{};         // one element, fp32 (fp64 of fp64)
  TensorView grad_hidden{};  // optional [rows, size], hidden's type
  TensorView grad_weight{};  // optional [classes, size], hidden's type or fp32
};

// The rows of a chunk: whole tiles of a product where there is room for them, chunks of equal size.
KP_EXPORT int64_t rows_per_chunk(int64_t rows, int64_t classes, DType dtype, int64_t chunk_bytes = kChunkBytes);

KP_EXPORT void forward(const Forward& arguments, Context& context);

}  // namespace kernel_pytorch::linear_cross_entropy
