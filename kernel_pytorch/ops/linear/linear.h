// A linear layer with its bias, activation and residual, and its gradients.
//
//   preactivation = x weight^T + bias                        (kept for the backward where there is an activation)
//   output        = f(preactivation) + residual
//   gated:   output[j] = f(preactivation[2 j]) * preactivation[2 j + 1] + residual[j]: the weight's rows are pairs
//            (gate, up, gate, up, ...), and the output has half as many columns
//   with weight_up:  output = f(x weight^T + bias) * (x weight_up^T) + residual: gates and ups by two matrices
//
// Forward is one GEMM with an epilogue; with weight_up where a kernel takes two matrices, else two and their product.
// weight_up is for calls that need no gradient: nothing is kept for a backward. Backward is the activation's gradient
// and two GEMMs; the bias' gradient comes with the weight's GEMM, except where grad_weight is column-major, which is
// the GEMM of the transposed operands. Made of matmul and activation, with their kernels, types and errors.
//
// Shapes: x [..., in], weight [out, in], bias [out], residual and output [..., out] (gated: out / 2), preactivation
// [..., out]. Leading dimensions merge, the last stride is 1; of the weight one stride is 1. Types: fp32, bf16, fp16
// or fp64 alike; bias and its gradient x's type or fp32; grad_weight x's type or fp32. `precision` is that of every
// GEMM, as matmul has it.
#pragma once

#include <memory>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/matmul/matmul.h"

namespace kernel_pytorch::linear {

using Kind = matmul::Kind;

// The functions of matmul; the one that keeps nothing for a backward is the first.
enum class Activation : uint8_t { kIdentity, kGelu, kGeluTanh, kSilu, kRelu, kReluSquared, kSigmoid, kTanh };
inline constexpr std::string_view kActivationNames = "identity gelu gelu_tanh silu relu relu_squared sigmoid tanh";
constexpr Kind kind_of(Activation activation) {
  return activation == Activation::kIdentity ? Kind::kIdentity : static_cast<Kind>(static_cast<int>(activation) - 1);
}
static_assert(kind_of(Activation::kGelu) == Kind::kGelu && kind_of(Activation::kTanh) == Kind::kTanh);

struct Forward {
  TensorView x{};
  TensorView weight{};
  TensorView bias{};      // optional
  TensorView residual{};  // optional
  Activation activation = Activation::kIdentity;
  bool gated = false;
  matmul::Precision precision = matmul::Precision::kFull;
  TensorView weight_up{};  // optional; as weight
  TensorView output{};
  TensorView preactivation{};  // optional; with an activation
};

inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "... in", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Forward::weight>({.shape = "out in", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Forward::bias>({.shape = "out", .memory = MemoryLayout::kContiguous, .usual = true}),
    optional_input<&Forward::residual>(
        {.shape = "... out/2 | ... out", .shape_by = "gated", .memory = MemoryLayout::kRows}),
    option<&Forward::activation>({.key = KeyPart::kValue, .choices = kActivationNames}),
    option<&Forward::gated>({.key = KeyPart::kValue}),
    option<&Forward::precision>({.key = KeyPart::kValue, .choices = matmul::kPrecisionNames}),
    optional_input<&Forward::weight_up>({.shape = "out in", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    output<&Forward::output>({.shape = "... out/2 | ... out", .shape_by = "gated", .dtype = "x"}),
    saved<&Forward::preactivation>({.shape = "0 | ... out", .shape_by = "activation", .dtype = "x"}));

// The residual's gradient is grad_output itself.
struct Backward {
  TensorView grad_output{};
  TensorView x{};
  TensorView weight{};
  TensorView bias{};           // optional: its type is that of its gradient
  TensorView preactivation{};  // with an activation
  Activation activation = Activation::kIdentity;
  bool gated = false;
  matmul::Precision precision = matmul::Precision::kFull;
  TensorView grad_x{};       // optional, as are
  TensorView grad_weight{};  // all three; in either order of memory
  TensorView grad_bias{};
};

inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... out/2 | ... out", .shape_by = "gated", .memory = MemoryLayout::kRows}),
    input<&Backward::x>({.shape = "... in", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Backward::weight>({.shape = "out in", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Backward::bias>({.shape = "out", .memory = MemoryLayout::kContiguous, .usual = true}),
    input<&Backward::preactivation>({.shape = "0 | ... out", .shape_by = "activation", .memory = MemoryLayout::kRows}),
    option<&Backward::activation>({.key = KeyPart::kValue, .choices = kActivationNames}),
    option<&Backward::gated>({.key = KeyPart::kValue}),
    option<&Backward::precision>({.key = KeyPart::kValue, .choices = matmul::kPrecisionNames}),
    output<&Backward::grad_x>({.shape = "... in", .dtype = "x", .wanted = "input_grad"}),
    output<&Backward::grad_weight>({.shape = "out in",
                                    .order_of = "weight",
                                    .dtype = "weight",
                                    .dtype_option = "weight_dtype",
                                    .wanted = "weight_grad"}),
    output<&Backward::grad_bias>({.shape = "like bias", .dtype = "bias", .wanted = "bias_grad"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

// The GEMMs that a call makes, as problems of the registry. The device outlives them.
std::vector<std::unique_ptr<registry::AnyProblem>> parts_of(const Forward& arguments, const DeviceInfo& device);
std::vector<std::unique_ptr<registry::AnyProblem>> parts_of(const Backward& arguments, const DeviceInfo& device);

// Whether a layer has something to keep for its backward.
inline bool has_activation(Activation activation, bool gated) {
  return gated || activation != Activation::kIdentity;
}

}  // namespace kernel_pytorch::linear
