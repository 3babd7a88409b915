// The score and mask programs of a call: declared here, defined by text that the host generates for the call.
#pragma once

#include "kernel_pytorch/ops/attention/attention_cuda.h"

namespace kernel_pytorch::attention {

// In natural units, with its derivative to the score that goes in.
__device__ float score_program(float score, const ScoreArguments& arguments, const Head& head, Place place);
__device__ float score_program_derivative(float score, const ScoreArguments& arguments, const Head& head, Place place);
__device__ bool mask_program(const ScoreArguments& arguments, const Head& head, Place place);

}  // namespace kernel_pytorch::attention
