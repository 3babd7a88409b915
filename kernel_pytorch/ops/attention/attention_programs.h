// The score and mask programs of a call: parsed, differentiated and printed once per text and process.
#pragma once

#include "kernel_pytorch/expression/mods.h"
#include "kernel_pytorch/ops/attention/attention.h"

namespace kernel_pytorch::attention {

inline bool has_programs(const Scoring& scoring) {
  return !scoring.score_mod.empty() || !scoring.mask_mod.empty();
}

// Throws kInvalidArgument where a text is no program, or not one of its kind.
inline const expression::Mods& programs_of(const Scoring& scoring) {
  return expression::mods_of(scoring.score_mod, scoring.mask_mod, "attention");
}

}  // namespace kernel_pytorch::attention
