#include "kernel_pytorch/ops/activation/activation.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::activation {

Kind kind_of(std::string_view word, std::string_view op) {
  const std::vector<std::string_view> words = registry::words_of(pointwise::kKindWords);
  const auto found = std::ranges::find(words, word);
  KP_CHECK(found != words.end(), op, ": kind is \"", word, "\"; known are ", pointwise::kKindWords);
  return static_cast<Kind>(found - words.begin());
}

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem{.kind = arguments.kind,
                                    .dropout = arguments.dropout_p,
                                    .gate = arguments.x,
                                    .up = {},
                                    .gate_bias = arguments.bias,
                                    .up_bias = {},
                                    .residual = arguments.residual,
                                    .seed = arguments.seed,
                                    .output = arguments.output};
  pointwise::check_and_merge("activation", "x", problem, context);
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  pointwise::BackwardProblem problem{.kind = arguments.kind,
                                     .dropout = arguments.dropout_p,
                                     .grad_output = arguments.grad_output,
                                     .gate = arguments.x,
                                     .up = {},
                                     .gate_bias = arguments.bias,
                                     .up_bias = {},
                                     .seed = arguments.seed,
                                     .grad_gate = arguments.grad_input,
                                     .grad_up = {},
                                     .grad_gate_bias = arguments.grad_bias,
                                     .grad_up_bias = {}};
  pointwise::check_and_merge("activation", "x", problem, context);
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::activation
