// Numbers of a call that may be as large as 64 bits allow: what kernels compute with instead.
#pragma once

#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

// Whether offsets, windows, first places and block sizes are small enough for sums of them in 32 bits.
bool has_near_numbers(const Scoring& scoring, const Sizes& sizes);
// Moves those that are not next to the sequences, which changes no score: a distance beyond every pair of query and key
// is as good as the next one beyond. Of checked arguments.
void bound_numbers(Scoring& scoring, const Sizes& sizes);

// causal_offset between places of the call does not fit a distance that fp32 counts in steps of 1, as ALiBi does.
bool is_beyond_alibi(const Scoring& scoring);

}  // namespace kernel_pytorch::attention
