// The score and mask function of a call, by their texts: parsed, checked, differentiated and printed once for the
// process, so that a call pays for a look-up.
#pragma once

#include <optional>
#include <string>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/gradient.h"

namespace kernel_pytorch::expression {

struct Mods {
  std::optional<Program> score_mod;  // one float
  std::optional<Program> mask_mod;   // one bool
  std::optional<Gradient> score_mod_gradient;
  // Both in one: where(mask_mod, score_mod, -inf), whichever there are.
  std::optional<Program> masked_score;
  // DeviceCode::generated of a forward, and of a backward, which has score_mod_gradient too. Empty where a captured
  // tensor is fp64, which GPUs do not take.
  std::string cuda_forward, cuda_backward;
};

// Empty texts stand for none. Throws kInvalidArgument naming `op` where a function gives the wrong type, or the two
// capture different tensors. The reference stays valid for good.
KP_EXPORT const Mods& mods_of(const std::string& score_mod, const std::string& mask_mod, const char* op);

}  // namespace kernel_pytorch::expression
