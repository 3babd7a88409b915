// A matrix product with what surrounds it in the same pass.
//
//   v            = alpha * sum over k of a[m, k] * b[k, n]             (fp32 sums whatever the types, fp64 of fp64)
//   v           += bias[n]
//   preactivation[m, n] = v                                            (optional output: what a backward saves)
//   row_sums[m]  = sum over k of a[m, k]                               (optional: a bias gradient with dW = dY^T X)
//   output[m, n] = form(v) + beta * residual[m, n]
//
// Forms, with f the activation (identity by default):
//   kPlain          f(v[m, n])
//   kGated          f(v[m, 2 j]) * v[m, 2 j + 1] at [m, j]: columns come in pairs (gate, up) side by side
//   kGatedTwice     f(v[m, j]) * u[m, j], with u = alpha * a up: gates and ups are columns of two matrices
//   kGradient       v[m, n] * f'(saved[m, n]): the product is the gradient of f's result, saved what f was taken of
//   kGatedGradient  v[m, j] * saved[m, 2 j + 1] * f'(saved[m, 2 j]) at [m, 2 j], v[m, j] * f(saved[m, 2 j]) next to it
//
// Shapes: a [..., m, k], b [..., k, n], up as b, output [..., m, n] (kGated: n / 2 columns, kGatedGradient: 2 n) with
// the same leading sizes, which merge into one, the batch; residual and saved as the output, preactivation [..., m, n],
// bias [n], row_sums [..., m] dense. One of the last two strides of a and of b is 1, so that all four transpositions
// are views; the last stride of the others is 1. Batch strides of inputs may be 0. The residual may be the output
// itself: output += a b is beta = 1. Other overlaps are not allowed. Sizes of 0 are legal; a sum over nothing is 0.
// beta = 0 reads no residual.
//
// Types: a and b fp32, bf16 or fp16 alike, output theirs or fp32; bias, residual and saved the output's or fp32;
// preactivation the output's; row_sums a's or fp32. Or everything fp64. NaN and infinity propagate.
//
// Precision: kFull multiplies as the types say, fp32 by products that are right to 2^-22 at least. The others are for
// fp32 tensors and only ever what a caller asked for: kTf32 rounds a and b to 11 bits (CUDA), kBf16 rounds them to
// bf16, kBf16x3 splits each into two bf16 and adds three products, which loses little of fp32 (relative error
// of a term 2^-16).
#pragma once

#include <memory>
#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"
#include "kernel_pytorch/ops/matmul/form_cuda.h"

namespace kernel_pytorch::registry {
class AnyProblem;
}

namespace kernel_pytorch::matmul {

using Kind = pointwise::Kind;
inline constexpr std::string_view kFormNames = "plain gated gradient gated_gradient gated_twice";
inline constexpr std::string_view kPrecisionNames = "full tf32 bf16 bf16x3";

struct Product {
  TensorView a{};
  TensorView b{};
  TensorView up{};  // with kGatedTwice, which takes no bias, preactivation or row_sums
  double alpha = 1;
  TensorView bias{};  // optional
  Form form = Form::kPlain;
  Kind activation = Kind::kIdentity;
  TensorView saved{};     // with kGradient and kGatedGradient
  TensorView residual{};  // optional; may be the output
  double beta = 1;
  Precision precision = Precision::kFull;
  TensorView output{};
  TensorView preactivation{};  // optional
  TensorView row_sums{};       // optional
};

inline constexpr std::string_view kOutputShape = "... m n | ... m n/2 | ... m n | ... m n*2 | ... m n";
inline constexpr auto kProductFields = fields<Product>(
    output<&Product::output>({.shape = kOutputShape, .shape_by = "form", .dtype = "a", .trial_dtype = "output"}),
    input<&Product::a>({.shape = "... m k", .leads = true, .bucketed = "m k", .memory = MemoryLayout::kMatrix}),
    input<&Product::b>(
        {.shape = "... k n", .bucketed = "n", .dtype = "a", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Product::up>({.shape = "... k n", .dtype = "a", .memory = MemoryLayout::kMatrix, .hidden = true}),
    option<&Product::alpha>({.hidden = true}), option<&Product::beta>({.hidden = true}),
    optional_input<&Product::bias>({.shape = "n", .dtype = "output", .hidden = true}),
    option<&Product::form>({.key = KeyPart::kValue, .hidden = true, .choices = kFormNames}),
    option<&Product::activation>({.key = KeyPart::kValue, .hidden = true, .choices = pointwise::kKindWords}),
    optional_input<&Product::saved>({.shape = kOutputShape, .shape_by = "form", .dtype = "output", .hidden = true}),
    optional_input<&Product::residual>({.shape = kOutputShape, .shape_by = "form", .dtype = "output", .hidden = true}),
    option<&Product::precision>({.key = KeyPart::kValue, .choices = kPrecisionNames}),
    output<&Product::preactivation>({.shape = "... m n", .dtype = "output", .hidden = true, .trial = "preactivation"}),
    output<&Product::row_sums>({.shape = "... m", .dtype = "a", .hidden = true, .trial = "row_sums"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);
// output += alpha * a b: the residual is the output.
KP_EXPORT void accumulate(const Product& arguments, Context& context);

// Whether a kernel computes the product: with kGatedTwice, which few take, the caller may have to compute it in parts.
bool has_kernel(const Product& arguments, const DeviceInfo& device);

// The gradient of a gated product's pairs where no product comes before it: kGatedGradient of v = grad_output.
struct PairGradient {
  Kind activation = Kind::kSilu;
  TensorView grad_output{};  // [rows, n], the last stride 1
  TensorView saved{};        // [rows, 2 n], of grad_output's type; likewise
  TensorView grad_input{};   // as saved
};
inline constexpr auto kPairFields =
    fields<PairGradient>(option<&PairGradient::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
                         input<&PairGradient::grad_output>({.shape = "... columns", .leads = true}),
                         input<&PairGradient::saved>({.shape = "... columns*2", .dtype = "grad_output"}),
                         output<&PairGradient::grad_input>({.shape = "... columns*2", .dtype = "saved"}));
KP_EXPORT void pair_gradient(const PairGradient& arguments, Context& context);

// The same as problems of the registry, checked, without data: for ops that are made of them, to say what their parts
// are. The device outlives the problem.
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const Product& arguments, const DeviceInfo& device);
KP_EXPORT std::unique_ptr<registry::AnyProblem> problem_of(const PairGradient& arguments, const DeviceInfo& device);

}  // namespace kernel_pytorch::matmul
