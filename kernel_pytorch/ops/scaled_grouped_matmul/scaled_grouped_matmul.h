// Products of groups of FP8 rows, each group with an FP8 matrix and scales of its own: a mixture's experts in FP8.
//
//   output[r, j] = sum over i of (scale_a a[r, i]) (scale_b b[g, j, i]) + bias[g, j],  g the group of r
//
// Groups and gathers are those of ops/grouped_matmul: group g is the rows [offsets[g - 1], offsets[g]), groups may be
// empty, rows in no group give zeros, and with gather row r is row gather[r] of a and of its scales.
//
// a [rows, k] and b [groups, n, k] are e4m3 or e5m2, both dense in k, as in ops/scaled_matmul. Scales are fp32 factors:
//   of a: [] or [1]; one per row [source]; 1x128 blocks [source, ceil(k/128)];
//   of b: [] or [1]; one per matrix [groups]; one per row [groups, n]; 1x128 blocks [groups, n, ceil(k/128)]; 128x128
//   blocks [groups, ceil(n/128), ceil(k/128)].
// Output fp32, bf16 or fp16; bias fp32 or the output's type. accurate: as in ops/scaled_matmul. k and the number of
// groups are positive; there may be no rows.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::scaled_grouped_matmul {

// What front ends that allocate the output choose its type by.
enum class OutputFormat : uint8_t { kFp32, kBf16, kFp16 };

struct Product {
  TensorView a{};        // [rows, k], or with gather [any, k]
  TensorView b{};        // [groups, n, k]
  TensorView scale_a{};  // fp32
  TensorView scale_b{};  // fp32
  TensorView offsets{};  // [groups]
  TensorView gather{};   // optional [rows]
  TensorView bias{};     // optional [groups, n]
  OutputFormat output_format = OutputFormat::kBf16;
  bool accurate = true;
  int64_t rows = 0;     // of the output, where a front end makes it
  TensorView output{};  // [rows, n]
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::a>({.shape = "source k", .leads = true, .bucketed = "source", .memory = MemoryLayout::kDenseLast}),
    input<&Product::b>({.shape = "groups n k", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Product::scale_a>({.content = "positive"}), input<&Product::scale_b>({.content = "positive"}),
    input<&Product::offsets>({.shape = "groups", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::gather>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::bias>({.shape = "groups n", .memory = MemoryLayout::kContiguous}),
    option<&Product::output_format>({.name = "dtype", .choices = "fp32 bf16 fp16", .trial = "output_format"}),
    option<&Product::accurate>({.key = KeyPart::kValue}), option<&Product::rows>({.symbolic = true}),
    output<&Product::output>({.shape = "rows n", .dtype = "named dtype"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure. Offsets are read on the CPU, and with
// KERNEL_PYTORCH_CHECK=1 on a GPU, where they are clamped to the rows otherwise.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::scaled_grouped_matmul
