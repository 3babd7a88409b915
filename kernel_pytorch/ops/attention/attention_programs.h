// The score and mask programs of a call, parsed and differentiated once per text and process.
#pragma once

#include <memory>

#include "kernel_pytorch/expression/expression.h"
#include "kernel_pytorch/expression/gradient.h"
#include "kernel_pytorch/ops/attention/attention.h"

namespace kernel_pytorch::attention {

struct Programs {
  expression::Program score, mask;  // without results where the call has none
  expression::Gradient score_gradient;

  bool has_score() const { return !score.results.empty(); }
  bool has_mask() const { return !mask.results.empty(); }
};

inline bool has_programs(const Scoring& scoring) {
  return !scoring.score_mod.empty() || !scoring.mask_mod.empty();
}

// Throws kInvalidArgument where a text is no program, or not one of its kind: a score program returns a float, a mask
// program a bool and does not read the score.
std::shared_ptr<const Programs> programs_of(const Scoring& scoring);

}  // namespace kernel_pytorch::attention
