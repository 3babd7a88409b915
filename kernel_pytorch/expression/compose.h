// Programs made of programs.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

// where(mask_mod(...), score_mod(score, ...), -inf), so that a tile is walked once. Both have the same captures.
KP_EXPORT Program masked(const Program& score_mod, const Program& mask_mod);

// score_mod(score, ...) = score.
KP_EXPORT Program unchanged_score(std::vector<Capture> captures = {});

}  // namespace kernel_pytorch::expression
