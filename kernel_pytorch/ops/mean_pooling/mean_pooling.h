// Means over tokens, in two meanings: of whole sequences, and of chunks of them.
//
// mean_pool        x [batch, tokens, ..., columns]                       -> [batch, ..., columns]
//                  x [tokens, ..., columns], offsets [sequences + 1]     -> [sequences, ..., columns]
//                  Sequence i is tokens offsets[i] up to offsets[i + 1] (cu_seqlens), read on the device. An empty
//                  sequence has mean 0; tokens in no sequence have gradient 0.
// chunk_mean_pool  x [batch, tokens, ..., columns], chunk_size           -> [batch, chunks, ..., columns]
//                  chunks = tokens / chunk_size, rounded up; the last is divided by its own length.
//
// Backward: the gradient of a token is that of its mean over the mean's length. Types: fp32, bf16, fp16, and fp64 on
// the CPU; sums are fp32 (fp64 for fp64) in a fixed order: bitwise repeatable. x may have any strides as long as the
// dimensions between tokens and columns can be addressed as one. NaN and infinity propagate. Empty x is legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::mean_pooling {

struct Forward {
  TensorView x{};
  TensorView offsets{};    // optional: int32 or int64, contiguous
  int64_t chunk_size = 0;  // 0: whole sequences
  int64_t tokens = 0;      // what front ends keep for the backward instead of x
  TensorView output{};     // contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>(
        {.shape = "tokens ... columns | batch tokens ... columns", .shape_by = "offsets", .leads = true}),
    optional_input<&Forward::offsets>({.shape = "offsets", .memory = MemoryLayout::kContiguous}),
    option<&Forward::chunk_size>(), option<&Forward::tokens>({.symbolic = true}),
    output<&Forward::output>(
        {.shape = "offsets-1 ... columns | batch ceil(tokens/chunk_size) ... columns | batch ... columns",
         .shape_by = "offsets chunk_size",
         .dtype = "x"}));

struct Backward {
  TensorView grad_output{};  // contiguous
  TensorView offsets{};
  int64_t chunk_size = 0;
  int64_t tokens = 0;       // of x, where grad_input is made by a front end
  TensorView grad_input{};  // x's shape, contiguous
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "sequences ... columns | batch chunks ... columns | batch ... columns",
                                   .shape_by = "offsets chunk_size",
                                   .leads = true,
                                   .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::offsets>({.shape = "offsets", .memory = MemoryLayout::kContiguous}),
    option<&Backward::chunk_size>(), option<&Backward::tokens>({.symbolic = true}),
    output<&Backward::grad_input>(
        {.shape = "tokens ... columns | batch tokens ... columns", .shape_by = "offsets", .dtype = "grad_output"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure. chunk_size chooses the op.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);
// The same of chunks alone: a chunk_size of 0 is an error.
KP_EXPORT void chunk_forward(const Forward& arguments, Context& context);
KP_EXPORT void chunk_backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::mean_pooling
