// Cross entropy of logits against class indices, and its gradient in the same visit to the logits.
//
//   z    = logits, or softcap * tanh(logits / softcap)
//   lse  = log(sum over the vocabulary of e^z)
//   loss = (1 - s) w[t] (lse - z[t]) + s/V sum_j w[j] (lse - z[j]) + z_loss lse^2     s: label_smoothing, w: weight or
//   1 total = sum of the rows' losses, for kMean divided by the sum of w[t] over the rows that count (their number
//   without
//           weights), as torch does; with no row that counts the mean is NaN
//   grad_logits = gradient_scale * d(loss or total) / d(logits), for kNone and kSum of each row's own loss
//
// Shapes: logits [..., columns] with any strides, target [...] int64, weight [V]. V is `vocabulary`, or the columns
// where that is 0. A row whose target is ignore_index counts for nothing: loss, lse and gradient are 0, its logits are
// not read. Any other target outside [0, V) is an error on the CPU; on a GPU, which could only wait to say so, that
// row's loss and gradient are NaN. NaN and infinite logits do as in torch. Results are the same bits from run to run.
// Types: fp32, bf16, fp16 everywhere, fp64 on the CPU; weight has the logits' type or fp32. Arithmetic is fp32 (fp64).
//
// Vocabulary-parallel: each rank has columns [first_column, first_column + columns) of V. `partials` of Forward gives
// its share; lse = max + log(sum) over all shares, z[t] and the sum of w z add up; Backward with that global
// lse gives the gradient of each part.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::cross_entropy {

enum class Reduction : uint8_t { kNone, kSum, kMean };

struct Options {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;  // 0: none
  int64_t vocabulary = 0;
  int64_t first_column = 0;
};
inline constexpr auto kOptionFields = field_group<Options>(
    option<&Options::ignore_index>(), option<&Options::label_smoothing>(), option<&Options::z_loss>(),
    option<&Options::softcap>(), option<&Options::vocabulary>({.hidden = true}),
    option<&Options::first_column>({.hidden = true}));

struct Forward {
  TensorView logits{};
  TensorView target{};
  TensorView weight{};  // optional
  Options options{};
  Reduction reduction = Reduction::kMean;
  double gradient_scale = 1;
  TensorView loss{};         // optional [rows] fp32 (fp64 for fp64); needed where there is a total
  TensorView lse{};          // optional [rows], likewise
  TensorView total{};        // optional, one element, likewise; with kSum or kMean
  TensorView grad_logits{};  // optional, logits' shape and type, contiguous; may be the logits themselves
  // Optional [rows, 4], fp32 (fp64): max, sum of e^(z - max), z[t] (0 where it is elsewhere), sum of w z. Alone: no
  // other output may be asked for, and no weight.
  TensorView partials{};
};
// Of losses that are not reduced, and of partials.
inline constexpr auto kRowsFields = fields<Forward>(
    input<&Forward::logits>({.shape = "... columns", .leads = true}),
    input<&Forward::target>({.shape = "...", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::weight>({.shape = "classes", .memory = MemoryLayout::kContiguous}),
    all_of<&Forward::options, kOptionFields>(), unused<&Forward::reduction>(), unused<&Forward::gradient_scale>(),
    output<&Forward::loss>({.name = "output", .shape = "...", .dtype = "statistic logits"}),
    saved<&Forward::lse>({.shape = "...", .dtype = "statistic logits"}), unused<&Forward::total>(),
    unused<&Forward::grad_logits>(), output<&Forward::partials>({.shape = "... 4", .dtype = "statistic logits"}));

// A reduced loss, with its gradient for a gradient of 1 of the loss.
struct Reduced {
  TensorView logits{};
  TensorView target{};
  TensorView weight{};
  Options options{};
  bool mean = true;          // or the sum
  TensorView output{};       // one element, fp32 (fp64 for fp64)
  TensorView grad_logits{};  // as in Forward
};
inline constexpr auto kReducedFields =
    fields<Reduced>(input<&Reduced::logits>({.shape = "... columns", .leads = true}),
                    input<&Reduced::target>({.shape = "...", .memory = MemoryLayout::kContiguous}),
                    optional_input<&Reduced::weight>({.shape = "classes", .memory = MemoryLayout::kContiguous}),
                    all_of<&Reduced::options, kOptionFields>(), option<&Reduced::mean>(),
                    output<&Reduced::output>({.shape = "()", .dtype = "statistic logits"}),
                    saved<&Reduced::grad_logits>({.shape = "... columns", .dtype = "logits", .in_place = "logits"}));

// The gradient from an lse that is known: for losses that were not reduced, and for a part of the vocabulary.
struct Backward {
  TensorView logits{};
  TensorView target{};
  TensorView weight{};
  Options options{};
  TensorView lse{};          // [rows], of the whole vocabulary
  TensorView grad_loss{};    // [rows] or one element, lse's type: gradient of each row's loss
  TensorView grad_logits{};  // as in Forward
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_loss>({.name = "grad_output", .shape = "...", .memory = MemoryLayout::kContiguous}),
    input<&Backward::logits>({.shape = "... columns", .leads = true}),
    input<&Backward::target>({.shape = "...", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::weight>({.shape = "classes", .memory = MemoryLayout::kContiguous}),
    input<&Backward::lse>({.shape = "...", .memory = MemoryLayout::kContiguous}),
    all_of<&Backward::options, kOptionFields>(),
    output<&Backward::grad_logits>({.shape = "... columns", .dtype = "logits"}));

// tensor *= scale, in place; nothing is touched where the scale is 1. It is one element on the tensor's device, fp32
// (fp64 for fp64), so that no call waits for its value. It rescales a gradient that was computed together with its
// loss if the gradient of the loss turns out not to be 1.
struct Rescale {
  TensorView tensor{};  // contiguous
  TensorView scale{};
};
inline constexpr auto kRescaleFields = fields<Rescale>(updated<&Rescale::tensor>(), input<&Rescale::scale>());

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);
KP_EXPORT void forward_rows(const Forward& arguments, Context& context);  // with Reduction::kNone
KP_EXPORT void reduce(const Reduced& arguments, Context& context);
KP_EXPORT void rescale(const Rescale& arguments, Context& context);

}  // namespace kernel_pytorch::cross_entropy
