// The score and mask programs of a call: declared here, defined by the text that the host generates for the call
// (expression/cuda_text.h), which a kernel without programs does not have.
#pragma once

#include "kernel_pytorch/cuda/tile/captures_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::generated {

__device__ float score_mod(float score, int32_t batch, int32_t head, int32_t query, int32_t key,
                           const tile::CapturedTensor* captures);
__device__ bool mask_mod(float score, int32_t batch, int32_t head, int32_t query, int32_t key,
                         const tile::CapturedTensor* captures);
template <class Add>
__device__ __forceinline__ float score_mod_gradient(float score, int32_t batch, int32_t head, int32_t query,
                                                    int32_t key, const tile::CapturedTensor* captures, float grad,
                                                    Add&& add);

}  // namespace kernel_pytorch::generated

#if __has_include("kernel_pytorch/generated.cuh")
#include "kernel_pytorch/generated.cuh"
#endif

namespace kernel_pytorch::attention {

// Programs count queries and keys as the whole does, of which the call may be a part.
__device__ __forceinline__ Place place_in_whole(const ScoreArguments& arguments, Place place) {
  return {place.query + arguments.part_query, place.key + arguments.part_key};
}

// Scores in natural units.
__device__ __forceinline__ float score_program(float score, const ScoreArguments& arguments, const Head& head,
                                               Place place) {
  const Place at = place_in_whole(arguments, place);
  return generated::score_mod(score, head.batch, head.head, at.query, at.key, arguments.captured);
}

struct AddNothing {
  template <class Load>
  __device__ __forceinline__ void operator()(Load, int64_t, float) const {}
};
template <class Add = AddNothing>  // not compiled where nothing asks for it
__device__ __forceinline__ float score_program_derivative(float score, const ScoreArguments& arguments,
                                                          const Head& head, Place place) {
  const Place at = place_in_whole(arguments, place);
  return generated::score_mod_gradient(score, head.batch, head.head, at.query, at.key, arguments.captured, 1.0f, Add{});
}

__device__ __forceinline__ bool mask_program(const ScoreArguments& arguments, const Head& head, Place place) {
  const Place at = place_in_whole(arguments, place);
  return generated::mask_mod(0.0f, head.batch, head.head, at.query, at.key, arguments.captured);
}

}  // namespace kernel_pytorch::attention
