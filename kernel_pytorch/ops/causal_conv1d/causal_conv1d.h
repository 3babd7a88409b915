// A depthwise convolution over the last tokens of each channel, as layers of linear attention have it in front.
//
//   output[t, c] = activation(bias[c] + sum over i < width of weight[c, i] * x[t - width + 1 + i, c])
//
// width is 2, 3 or 4. A sequence's tokens are preceded by initial_state, its last width - 1 inputs so far, zeros where
// absent; final_state are the last width - 1 inputs behind it, so that a sequence may be given in segments. With
// cu_seqlens the batch is 1 and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1]; tokens in no sequence have
// output 0 and gradient 0.
//
// Types: everything has x's: fp32, bf16, fp16, or fp64 on the CPU. Sums are fp32 (fp64 for fp64).
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::causal_conv1d {

enum class Activation : uint8_t { kNone, kSilu };
inline constexpr std::string_view kActivationNames = "none silu";
inline constexpr int64_t kLeastWidth = 2, kMostWidth = 4;
inline constexpr std::string_view kStateShape = "offsets-1 width-1 channels | batch width-1 channels";

struct Forward {
  TensorView x{};              // [batch, tokens, channels], last stride 1
  TensorView weight{};         // [channels, width], contiguous
  TensorView bias{};           // optional [channels], contiguous
  TensorView cu_seqlens{};     // optional: int32 or int64 [sequences + 1], contiguous
  TensorView initial_state{};  // optional [sequences, width - 1, channels], contiguous
  Activation activation = Activation::kNone;
  TensorView output{};       // x's shape, contiguous
  TensorView final_state{};  // contiguous; absent: not wanted
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "batch tokens channels",
                        .leads = true,
                        .bucketed = "batch tokens",
                        .memory = MemoryLayout::kDenseLast}),
    input<&Forward::weight>(
        {.shape = "channels width", .dtype = "x", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    optional_input<&Forward::bias>({.shape = "channels", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::cu_seqlens>({.shape = "offsets",
                                          .bucketed = "offsets",
                                          .memory = MemoryLayout::kContiguous,
                                          .key = KeyPart::kSizes,
                                          .content = "offsets x.1"}),
    optional_input<&Forward::initial_state>(
        {.shape = kStateShape, .shape_by = "cu_seqlens", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    option<&Forward::activation>({.key = KeyPart::kValue, .choices = kActivationNames}),
    output<&Forward::output>({.shape = "batch tokens channels", .dtype = "x"}),
    output<&Forward::final_state>({.shape = kStateShape,
                                   .shape_by = "cu_seqlens",
                                   .dtype = "x",
                                   .wanted = "return_state",
                                   .in_place = "initial_state"}));

struct Backward {
  TensorView grad_output{};  // x's shape, last stride 1
  TensorView x{}, weight{}, bias{}, cu_seqlens{}, initial_state{};
  TensorView grad_final_state{};  // optional, contiguous
  Activation activation = Activation::kNone;
  TensorView grad_x{}, grad_weight{};            // contiguous
  TensorView grad_bias{}, grad_initial_state{};  // contiguous; absent: not wanted
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "batch tokens channels", .dtype = "x", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::x>({.shape = "batch tokens channels",
                         .leads = true,
                         .bucketed = "batch tokens",
                         .memory = MemoryLayout::kDenseLast}),
    input<&Backward::weight>(
        {.shape = "channels width", .dtype = "x", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    optional_input<&Backward::bias>({.shape = "channels", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::cu_seqlens>({.shape = "offsets",
                                           .bucketed = "offsets",
                                           .memory = MemoryLayout::kContiguous,
                                           .key = KeyPart::kSizes,
                                           .content = "offsets x.1"}),
    optional_input<&Backward::initial_state>(
        {.shape = kStateShape, .shape_by = "cu_seqlens", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::grad_final_state>(
        {.shape = kStateShape, .shape_by = "cu_seqlens", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    option<&Backward::activation>({.key = KeyPart::kValue, .choices = kActivationNames}),
    output<&Backward::grad_x>({.shape = "batch tokens channels", .dtype = "x"}),
    output<&Backward::grad_weight>({.shape = "channels width", .dtype = "x"}),
    output<&Backward::grad_bias>({.shape = "like bias", .dtype = "x", .wanted = "bias_grad"}),
    output<&Backward::grad_initial_state>(
        {.shape = "like initial_state", .dtype = "x", .wanted = "initial_state_grad"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::causal_conv1d
