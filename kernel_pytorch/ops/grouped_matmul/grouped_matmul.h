// Products of groups of rows, each group with a matrix of its own: the experts of a mixture, whose sizes only the
// device knows.
//
// Group g is the rows [offsets[g - 1], offsets[g]), from 0 on: offsets are the groups' ends. They ascend; groups may be
// empty, and rows behind the last group are in none.
//
// grouped_matmul         v[r, n]      = sum over k of a[r, k] * b[group of r, k, n] + bias[group of r, n]
//                        preactivation[r, n] = v[r, n]                                                 (optional)
//                        output[r, :] = form of v[r, :], zeros for rows in no group
// grouped_matmul_weight  output[g, m, n] = sum over rows r of group g of a[r, m] * b[r, n]; of an empty group zeros
// group_sums             output[g, n] = sum over rows r of group g of factors[r] * x[r, n]
//
// Forms, with f the activation: kPlain f(v[r, n]); kGated f(v[r, 2 j]) * v[r, 2 j + 1] at [r, j]; kPackedGated
// f(v[r, j]) * v[r, N / 2 + j]. With a limit a gate is f(min(g, limit)), f(g) = g * sigmoid(slope * g), and its factor
// clamp(u, -limit, limit) + 1: the clamped SwiGLU of gpt-oss.
//
// With gather (of a, of b, of x) row r is row gather[r] of the tensor, which may have any number of rows. Gathers are
// int32; those of rows in no group are not read. Sums are fp32 whatever the types, fp64 of fp64.
//
// Types: a, b and x fp32, bf16 or fp16 alike, on the CPU also fp64; outputs theirs or fp32; bias theirs or fp32,
// factors fp32 (fp64). The last stride of a, x and outputs is 1; of b (and the output of grouped_matmul_weight) one of
// the last two is 1, so that a transposed weight is a view. Sizes of 0 are legal. Up to 1024 groups.
#pragma once

#include <memory>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"

namespace kernel_pytorch::registry {
class AnyProblem;
}

namespace kernel_pytorch::grouped_matmul {

using Kind = pointwise::Kind;
enum class Form : uint8_t { kPlain, kGated, kPackedGated };
inline constexpr std::string_view kFormNames = "plain gated packed_gated";
inline constexpr int64_t kMostGroups = 1024;

struct Product {
  TensorView a{};        // [rows, k], or with gather [any, k]
  TensorView b{};        // [groups, k, n]
  TensorView offsets{};  // [groups]
  TensorView gather{};   // optional [rows]
  TensorView bias{};     // optional [groups, n]
  Form form = Form::kPlain;
  Kind activation = Kind::kIdentity;
  double limit = 0;            // 0: none; with a gate, whose activation is then silu
  double slope = 1.702;        // with a limit
  int64_t rows = 0;            // of the output, where a front end makes it
  TensorView output{};         // [rows, n], gated: [rows, n / 2]
  TensorView preactivation{};  // optional [rows, n], the output's type
};
inline constexpr auto kProductFields = fields<Product>(
    input<&Product::a>({.shape = "source k", .leads = true, .bucketed = "source", .memory = MemoryLayout::kDenseLast}),
    input<&Product::b>({.shape = "groups k n", .dtype = "a", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    input<&Product::offsets>({.shape = "groups", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::gather>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::bias>({.shape = "groups n", .dtype = "a", .memory = MemoryLayout::kContiguous}),
    option<&Product::form>({.key = KeyPart::kValue, .choices = kFormNames}),
    option<&Product::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&Product::limit>({.key = KeyPart::kPresence}), option<&Product::slope>(),
    option<&Product::rows>({.symbolic = true}),
    output<&Product::output>({.shape = "rows n | rows n/2 | rows n/2",
                              .shape_by = "form",
                              .dtype = "a",
                              .dtype_option = "output_dtype",
                              .trial_dtype = "output"}),
    output<&Product::preactivation>({.shape = "rows n", .dtype = "output", .hidden = true, .trial = "preactivation"}));

struct WeightGradient {
  TensorView a{};         // [rows, m], or with gather_a [any, m]
  TensorView b{};         // [rows, n], or with gather_b [any, n]
  TensorView offsets{};   // [groups]
  TensorView gather_a{};  // optional [rows]; not both
  TensorView gather_b{};
  TensorView output{};  // [groups, m, n]
};
inline constexpr auto kWeightFields = fields<WeightGradient>(
    input<&WeightGradient::a>(
        {.shape = "source m", .leads = true, .bucketed = "source", .memory = MemoryLayout::kDenseLast}),
    input<&WeightGradient::b>(
        {.shape = "other n", .dtype = "a", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&WeightGradient::offsets>({.shape = "groups", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&WeightGradient::gather_a>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&WeightGradient::gather_b>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    output<&WeightGradient::output>(
        {.shape = "groups m n", .dtype = "a", .dtype_option = "output_dtype", .trial_dtype = "output"}));

struct Sums {
  TensorView x{};        // [rows, n], or with gather [any, n]
  TensorView offsets{};  // [groups]
  TensorView gather{};   // optional [rows]
  TensorView factors{};  // optional [rows]
  TensorView output{};   // [groups, n], contiguous
};
inline constexpr auto kSumsFields = fields<Sums>(
    input<&Sums::x>({.shape = "source n", .leads = true, .bucketed = "source", .memory = MemoryLayout::kDenseLast}),
    input<&Sums::offsets>({.shape = "groups", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Sums::gather>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Sums::factors>(
        {.shape = "factor_rows", .dtype = "statistic x", .memory = MemoryLayout::kContiguous}),
    output<&Sums::output>(
        {.shape = "groups n", .dtype = "x", .dtype_option = "output_dtype", .trial_dtype = "output"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure. Offsets are read on the CPU, and with
// KERNEL_PYTORCH_CHECK=1 on a GPU, where they are clamped to the rows otherwise.
KP_EXPORT void multiply(const Product& arguments, Context& context);
KP_EXPORT void weight_gradient(const WeightGradient& arguments, Context& context);
KP_EXPORT void sum(const Sums& arguments, Context& context);

// The same as problems of the registry, for ops that are made of them. The device outlives the problem.
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device);
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const WeightGradient& arguments, const DeviceInfo& device);
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const Sums& arguments, const DeviceInfo& device);

}  // namespace kernel_pytorch::grouped_matmul
