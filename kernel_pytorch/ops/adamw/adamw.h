// One step of AdamW (Loshchilov and Hutter, 2019) for a list of parameters, in place:
//
//   gradient   = gradient / grad_scale * min(1, max_norm / (total_norm / grad_scale + 1e-6)), negated to maximise
//   exp_avg    = exp_avg + (1 - beta1) * (gradient - exp_avg)
//   exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient^2
//   largest    = exp_avg_sq, or max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq) where that is kept (amsgrad)
//   step       = step + 1
//   parameter  = parameter * (1 - lr * weight_decay)
//                - lr / (1 - beta1^step) * exp_avg / (sqrt(largest) / sqrt(1 - beta2^step) + eps)
//
// Nothing at all changes, step included, where found_inf is not zero: a scaled gradient overflowed. lr, the scale, the
// norm and the steps are read on the device, so that a step can be captured in a CUDA graph and replayed.
//
// Types: parameters fp32, bf16 or fp16, and fp64 on the CPU, one type a call; gradients of that type; both averages of
// fp32, bf16 or the parameters' type. Arithmetic in fp32 (fp64 for fp64). A parameter's tensors share shape and
// strides, and fill their memory without gaps. With a master (fp32) that is what is updated, and the parameter is its
// rounded copy. With a seed, bf16 parameters and bf16 averages are rounded stochastically: up with the probability that
// the distance to the neighbour below tells, in steps of 1/65536, so that updates below half a unit are not lost.
//
// Random bits (base/philox.h): the elements of the list are counted through, every parameter beginning at the next
// multiple of 8; the parameter, the first and the second average draw from blocks i / 8, 2^60 + i / 8, 2^61 + i / 8.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::adamw {

struct Parameter {
  TensorView parameter{};
  TensorView gradient{};
  TensorView exp_avg{};
  TensorView exp_avg_sq{};
  TensorView max_exp_avg_sq{};  // optional: amsgrad; for all parameters or none
  TensorView master{};          // optional: fp32; for all parameters or none
  TensorView step{};            // one fp32: steps taken so far; each parameter has its own
};

struct Step {
  std::vector<Parameter> parameters{};
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  double max_norm = 0;  // with total_norm
  bool maximize = false;
  TensorView lr_tensor{};   // optional, one fp32: instead of lr; likewise below, all on the op's device
  TensorView grad_scale{};  // optional: gradients were multiplied by it
  TensorView found_inf{};   // optional: not zero where a gradient overflowed
  TensorView total_norm{};  // optional: of all gradients as they are, from reduce_norm; with max_norm
  TensorView seed{};        // optional int64[2] (seed, offset): stochastic rounding
};

inline constexpr auto kStepFields =
    field_group<Step>(unused<&Step::parameters>(), optional_input<&Step::lr_tensor>({.content = "positive"}),
                      optional_input<&Step::grad_scale>({.content = "positive"}),
                      optional_input<&Step::found_inf>({.content = "positive"}),
                      optional_input<&Step::total_norm>({.content = "positive"}),
                      optional_input<&Step::seed>({.memory = MemoryLayout::kContiguous, .content = "seeds"}),
                      option<&Step::lr>(), option<&Step::beta1>(), option<&Step::beta2>(), option<&Step::eps>(),
                      option<&Step::weight_decay>(), option<&Step::max_norm>(), option<&Step::maximize>());

// The same of one list for each member of Parameter, as front ends have them: each as long as `parameters`, the
// optional ones may be empty.
struct StepLists {
  std::vector<TensorView> parameters{}, gradients{}, exp_avgs{}, exp_avg_sqs{}, max_exp_avg_sqs{}, masters{}, steps{};
  Step step{};  // its `parameters` are not read
};
inline constexpr auto kStepListsFields = fields<StepLists>(
    updated<&StepLists::parameters>(), input<&StepLists::gradients>(), updated<&StepLists::exp_avgs>(),
    updated<&StepLists::exp_avg_sqs>(), updated<&StepLists::max_exp_avg_sqs>(), updated<&StepLists::masters>(),
    updated<&StepLists::steps>(), all_of<&StepLists::step, kStepFields>());

// Throw Error{kInvalidArgument} naming the parameter, both values and the cure.
KP_EXPORT void step(const Step& arguments, Context& context);
KP_EXPORT void step_lists(const StepLists& arguments, Context& context);

}  // namespace kernel_pytorch::adamw
