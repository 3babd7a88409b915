// Chunks of prompts: requests of many rows. Their keys are gathered once, a copy that each row's products outweigh, and
// attended by the tiles of `attention`, which read a key for 96 rows where a task of pages reads it for 8.
#pragma once

#include "kernel_pytorch/ops/paged_attention/operation.h"

namespace kernel_pytorch::paged_attention {

// Depends on the request alone, so that its bits do.
bool is_chunk(const Attend& problem, int64_t index);
void attend_chunk(const Attend& problem, int64_t index, Context& context);

}  // namespace kernel_pytorch::paged_attention
