// Gradients in few bits on their way between processes, and back, in one visit each. A message has rows, one for each
// process, of `columns` numbers: number i is in column i % columns of row i / columns; numbers beyond the end are 0.
//
// encode: value = x + error with `carries`, else x. A block of columns has one fp32 scale:
//   int8, int4   blocks of 256, of 64: scale = largest magnitude / 127, / 7; code = the integer nearest to
//                value * (1 / scale), ties to even; 0 where the scale is below 2^-126
//   onebit       blocks of 256: scale = mean magnitude; code = 1 where the value is not below 0: +scale, else -scale.
//                Magnitudes are added as 32 sums ((a b)(c d))((e f)(g h)) of numbers 4k to 4k + 3 and 128 + 4k to
//                131 + 4k, then by halves.
// A block with a NaN or an infinity, or whose sum is one, gets the scale NaN and codes that mean nothing. What the code
// leaves out, value - decoded, becomes the error (with `carries`), or gain times it is added to the error; where that
// is no finite number, the error becomes 0.
//
// decode: number = code * scale, or with `mean` the sum over the rows, first to last, by the number of rows; with
// `adds` it is added to what the output holds.
//
// Bytes: int8 a code each; int4 two, the first in the low half, 8 more than the integer; onebit eight, from the lowest
// bit. Shapes: x, error and output [count], contiguous; codes [rows, columns * bits / 8] and scales [rows, columns /
// block], each row dense and as far from the next as the caller likes, 4 bytes' multiples: views of one buffer to send.
// columns is a multiple of 256, count at most rows * columns (with `mean` columns). Types: x and output fp32, bf16 or
// fp16; error and scales fp32; codes int8. Every kernel gives the same bits.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/gradient_code/code_cuda.h"

namespace kernel_pytorch::gradient_code {

struct Encode {
  TensorView x{};
  TensorView error{};  // optional
  TensorView codes{};
  TensorView scales{};
  Code code = Code::kInt8;
  bool carries = true;
  double gain = 1;
};
struct Decode {
  TensorView codes{};
  TensorView scales{};
  TensorView output{};
  Code code = Code::kInt8;
  bool mean = false;
  bool adds = false;
};

inline constexpr auto kEncodeFields =
    fields<Encode>(input<&Encode::x>({.leads = true, .memory = MemoryLayout::kContiguous}),
                   optional_updated<&Encode::error>({.dtype = "fp32", .memory = MemoryLayout::kContiguous}),
                   updated<&Encode::codes>({.dtype = "int8"}), updated<&Encode::scales>({.dtype = "fp32"}),
                   option<&Encode::code>({.key = KeyPart::kValue, .choices = "int8 int4 onebit"}),
                   option<&Encode::carries>({.key = KeyPart::kValue}), option<&Encode::gain>());

inline constexpr auto kDecodeFields =
    fields<Decode>(input<&Decode::codes>({.dtype = "int8", .content = "indices 256"}),
                   input<&Decode::scales>({.dtype = "fp32", .content = "positive"}),
                   updated<&Decode::output>({.leads = true, .memory = MemoryLayout::kContiguous}),
                   option<&Decode::code>({.key = KeyPart::kValue, .choices = "int8 int4 onebit"}),
                   option<&Decode::mean>({.key = KeyPart::kValue}), option<&Decode::adds>({.key = KeyPart::kValue}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void encode(const Encode& arguments, Context& context);
KP_EXPORT void decode(const Decode& arguments, Context& context);

}  // namespace kernel_pytorch::gradient_code
