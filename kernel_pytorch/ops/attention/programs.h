// The score and mask programs of a call: parsed, differentiated and printed once per text and process.
#pragma once

#include "kernel_pytorch/expression/mods.h"
#include "kernel_pytorch/ops/attention/problem.h"

namespace kernel_pytorch::attention {

inline bool has_programs(const Options& options) {
  return !options.score_mod.empty() || !options.mask_mod.empty();
}

// Throws kInvalidArgument where a text is no program, or not one of its kind.
inline const expression::Mods& programs_of(const Options& options) {
  return expression::mods_of(options.score_mod, options.mask_mod, "attention");
}

}  // namespace kernel_pytorch::attention
