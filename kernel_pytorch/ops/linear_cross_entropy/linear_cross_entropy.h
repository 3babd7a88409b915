// The loss of a language model's head, and its gradients, without the logits: cross_entropy(hidden weight^T, target) by
// chunks of rows. One GEMM computes a chunk's logits, which become their own gradient in place; two more GEMMs consume
// it. Only one chunk of logits exists at a time.
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
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"

namespace kernel_pytorch::linear_cross_entropy {

inline constexpr int64_t kChunkBytes = int64_t{252} << 20;  // of logits: with what else a call needs, 256 MB

struct Forward {
  TensorView hidden{};  // [..., size], the last stride 1, the other dimensions merge
  TensorView weight{};  // [classes, size]; one stride 1
  TensorView target{};  // [...]
  TensorView class_weight{};
  cross_entropy::Options options{};
  int64_t chunk_bytes = kChunkBytes;
  bool hidden_grad = false, weight_grad = false;  // which gradients a front end makes
  bool wide = false;                              // and grad_weight of fp32
  TensorView loss{};                              // one element, fp32 (fp64 of fp64)
  TensorView grad_hidden{};                       // optional [..., size], hidden's type, contiguous
  TensorView grad_weight{};                       // optional [classes, size], hidden's type or fp32
};
inline constexpr auto kForwardFields =
    fields<Forward>(input<&Forward::hidden>({.shape = "... size", .leads = true, .memory = MemoryLayout::kRows}),
                    input<&Forward::weight>({.shape = "classes size", .memory = MemoryLayout::kMatrix}),
                    input<&Forward::target>({.shape = "...", .memory = MemoryLayout::kFlat}),
                    optional_input<&Forward::class_weight>({.shape = "classes", .memory = MemoryLayout::kContiguous}),
                    all_of<&Forward::options, cross_entropy::kOptionFields>(), option<&Forward::chunk_bytes>(),
                    option<&Forward::hidden_grad>(), option<&Forward::weight_grad>(), option<&Forward::wide>(),
                    output<&Forward::loss>({.name = "output", .shape = "()", .dtype = "statistic hidden"}),
                    output<&Forward::grad_hidden>({.shape = "... size", .dtype = "hidden", .wanted = "hidden_grad"}),
                    output<&Forward::grad_weight>(
                        {.shape = "classes size", .dtype = "statistic weight if wide", .wanted = "weight_grad"}));

// The rows of a chunk: whole GEMM tiles if chunk_bytes allows it, chunks of equal size.
KP_EXPORT int64_t rows_per_chunk(int64_t rows, int64_t classes, DType dtype, int64_t chunk_bytes = kChunkBytes);

KP_EXPORT void forward(const Forward& arguments, Context& context);

}  // namespace kernel_pytorch::linear_cross_entropy
