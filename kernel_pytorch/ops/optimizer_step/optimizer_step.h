// One step of an optimizer for a list of parameters, in place, with its states as numbers or in 8 bits:
//
//   gradient = gradient / grad_scale * min(1, max_norm / (total_norm / grad_scale + 1e-6)), negated to maximise
//   adamw      first = first + (1 - beta1) * (gradient - first);  second = beta2 * second + (1 - beta2) * gradient^2
//              largest = second, or maximum = max(maximum, second) where that is kept (amsgrad)
//              parameter = parameter * (1 - lr * weight_decay)
//                          - lr / (1 - beta1^step) * first / (sqrt(largest) / sqrt(1 - beta2^step) + eps)
//   lion       parameter = parameter * (1 - lr * weight_decay) - lr * sign(first + (1 - beta1) * (gradient - first))
//              first = first + (1 - beta2) * (gradient - first)
//   sgd        gradient = gradient + weight_decay * parameter
//              first = beta1 * first + (1 - dampening) * gradient, or the gradient itself in the first step
//              parameter = parameter - lr * (nesterov ? gradient + beta1 * first : first); without `first` the gradient
//
// Nothing at all changes, step included, where found_inf is not zero. lr, the scale, the norm and the steps are read on
// the device, so that a step can be captured in a CUDA graph and replayed.
//
// Storage of the states, each with the parameter's shape and strides:
//   plain      Numbers of fp32; of adamw also of bf16 or of the parameters' type; fp64 for fp64 parameters.
//   companded  One byte in groups of 64 elements of memory with one fp32 scale, the group's largest magnitude. first:
//              127 * phi(first / scale), phi(x) = 2 x / (1 + |x|), to nearest. second: 255 * sqrt(second) / scale to
//              nearest, but at least 1 where it is not 0, so that no later step divides by less than it should.
//   dynamic    One byte in blocks of 256 elements with one fp32 scale: the nearest of 256 values of bitsandbytes'
//              dynamic map, signed for first (a negative number never becomes 0), unsigned for second.
// A NaN or an infinity makes its whole group NaN.
//
// With a correction (int8, bf16 parameters), parameter and correction together hold 24 bits of an fp32 master: the
// master's bits are (parameter << 16) + (correction << 8), and the parameter is the master rounded to nearest. A
// parameter of 0 ignores a negative correction, so that weights may be set to zero between steps. With a master (fp32;
// adamw with plain states) that is what is updated, and the parameter is its rounded copy.
//
// With a seed (adamw with plain states), bf16 parameters and bf16 states are rounded stochastically: up with the
// probability that the distance to the neighbour below tells, in steps of 1/65536, so that updates below half a unit
// are not lost. Random bits (base/philox.h): the elements of the list are counted through, every parameter beginning at
// the next multiple of 8; parameter, first and second draw from blocks i / 8, 2^60 + i / 8, 2^61 + i / 8.
//
// Parameters fp32, bf16 or fp16, and fp64 on the CPU with plain states, one type a call; gradients of that type. All
// tensors of a parameter share shape and strides, and fill their memory without gaps. Arithmetic is fp32 (fp64 for
// fp64), each operation rounded once in a fixed order (arithmetic_cuda.h): CPU levels, GPUs and the reference give the
// same bits, NaN and infinities aside. Squares below 2^-100 have the root 0, and denominators are at least 2^-100.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/optimizer_step/format_cuda.h"

namespace kernel_pytorch::optimizer_step {

struct Parameter {
  TensorView parameter{};
  TensorView gradient{};
  TensorView correction{};   // optional: int8; for all parameters or none
  TensorView master{};       // optional: fp32; likewise, and not with a correction
  TensorView first{};        // numbers or int8; sgd without momentum has none
  TensorView second{};       // adamw alone
  TensorView maximum{};      // optional: amsgrad; for all parameters or none
  TensorView first_scale{};  // fp32, one per group of the storage; absent with plain states, likewise below
  TensorView second_scale{};
  TensorView step{};  // one fp32: steps taken so far; each parameter has its own
};

struct Step {
  std::vector<Parameter> parameters{};
  Rule rule = Rule::kAdamW;
  Storage storage = Storage::kPlain;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  double dampening = 0;
  double max_norm = 0;  // with total_norm
  bool nesterov = false;
  bool maximize = false;
  TensorView lr_tensor{};   // optional, one fp32: instead of lr; likewise below, all on the op's device
  TensorView grad_scale{};  // optional: gradients were multiplied by it
  TensorView found_inf{};   // optional: not zero where a gradient overflowed
  TensorView total_norm{};  // optional: of all gradients as they are, from reduce_norm; with max_norm
  TensorView seed{};        // optional int64[2] (seed, offset): stochastic rounding
};

inline constexpr auto kStepFields = field_group<Step>(
    unused<&Step::parameters>(), optional_input<&Step::lr_tensor>(), optional_input<&Step::grad_scale>(),
    optional_input<&Step::found_inf>(), optional_input<&Step::total_norm>(),
    optional_input<&Step::seed>({.memory = MemoryLayout::kContiguous, .content = "seeds"}),
    option<&Step::rule>({.choices = "adamw lion sgd"}), option<&Step::storage>({.choices = "plain companded dynamic"}),
    option<&Step::lr>(), option<&Step::beta1>(), option<&Step::beta2>(), option<&Step::eps>(),
    option<&Step::weight_decay>(), option<&Step::dampening>(), option<&Step::max_norm>(), option<&Step::nesterov>(),
    option<&Step::maximize>());

// The same of one list for each member of Parameter, as front ends have them: each as long as `parameters`, the
// optional ones may be empty.
struct StepLists {
  std::vector<TensorView> parameters{}, gradients{}, corrections{}, masters{}, firsts{}, seconds{}, maxima{},
      first_scales{}, second_scales{}, steps{};
  Step step{};  // its `parameters` are not read
};
inline constexpr auto kStepListsFields = fields<StepLists>(
    updated<&StepLists::parameters>(), input<&StepLists::gradients>(), updated<&StepLists::corrections>(),
    updated<&StepLists::masters>(), updated<&StepLists::firsts>(), updated<&StepLists::seconds>(),
    updated<&StepLists::maxima>(), updated<&StepLists::first_scales>(), updated<&StepLists::second_scales>(),
    updated<&StepLists::steps>(), all_of<&StepLists::step, kStepFields>());

// Throw Error{kInvalidArgument} naming the parameter, both values and the cure.
KP_EXPORT void step(const Step& arguments, Context& context);
KP_EXPORT void step_lists(const StepLists& arguments, Context& context);

}  // namespace kernel_pytorch::optimizer_step
