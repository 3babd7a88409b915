// 2:4 sparsity: of each four neighbours of a row two are kept, and back.
//
// compress: of the columns 4 g to 4 g + 3 of a row the two of largest magnitude are kept, in their order; of equal
// ones the first. NaN counts as larger than every number.
//   values[r, 2 g], values[r, 2 g + 1]   what is kept of group g
//   metadata[b, r, w]                    a word for columns 64 b + 32 w and the next 31: bits 4 i to 4 i + 3 are
//                                        first | second << 2, the places (0 to 3, ascending) of group i's two values
// Groups behind the last column have the places 0 and 1. This is the order in which the matrix instructions of a
// stage read metadata: 8 bytes a row, rows next to each other.
//
// decompress: kept values at their places, zeros elsewhere.
//
// Shapes: x and output [rows, columns], columns a multiple of 4, rows any distance apart; values [rows, columns / 2],
// metadata int32 [ceil(columns / 64), rows, 2], contiguous. Types: fp32, bf16 or fp16, values as x. Sizes of 0 are
// legal. Every kernel gives the same bits.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::sparse_compress {

inline constexpr int64_t kGroup = 4;          // columns, of which two are kept
inline constexpr int64_t kWordColumns = 32;   // of a word of metadata
inline constexpr int64_t kBlockColumns = 64;  // of a row's two neighbouring words

struct Compress {
  TensorView x{};
  TensorView values{};
  TensorView metadata{};
};

struct Decompress {
  TensorView values{};
  TensorView metadata{};
  TensorView output{};
};

inline constexpr auto kCompressFields = fields<Compress>(
    input<&Compress::x>(
        {.shape = "rows columns", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kDenseLast}),
    output<&Compress::values>({.shape = "rows columns/2", .dtype = "x"}),
    output<&Compress::metadata>({.shape = "ceil(columns/64) rows 2", .dtype = "int32"}));

inline constexpr auto kDecompressFields = fields<Decompress>(
    input<&Decompress::values>(
        {.shape = "rows kept", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kContiguous}),
    input<&Decompress::metadata>(
        {.shape = "ceil(kept/32) rows 2", .dtype = "int32", .memory = MemoryLayout::kContiguous, .content = "places"}),
    output<&Decompress::output>({.shape = "rows kept*2", .dtype = "values"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void compress(const Compress& arguments, Context& context);
KP_EXPORT void decompress(const Decompress& arguments, Context& context);

// Checks of values and metadata of a matrix [rows, columns] that ops share.
void check_compressed(std::string_view op, const TensorView& values, const TensorView& metadata, int64_t rows,
                      int64_t columns, Device device);

}  // namespace kernel_pytorch::sparse_compress
