// rope on vectors of 16 bytes: cos and sin of a pair of vectors are brought to registers once and turn kHeads heads of
// the same token, whose vectors are all loaded before any is used.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/rope/cuda/table.cuh"

namespace kernel_pytorch::rope {

template <class T, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kThreads) rotate_vectors(const __grid_constant__ VectorArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  tile::follow_closely();
  const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= arguments.items) return;
  const uint32_t token = divide(item, arguments.items_per_token);
  const uint32_t in_token = item - token * arguments.items_per_token.divisor;
  const int group = static_cast<int>(divide(in_token, arguments.items_per_head));
  const int column_item = static_cast<int>(in_token - group * arguments.items_per_head.divisor);
  const int64_t batch = divide(token, arguments.sequence);
  const int64_t place = token - batch * arguments.sequence.divisor;

  const bool is_query = group < arguments.query_groups;
  const HeadTensor& input = is_query ? arguments.query : arguments.key;
  const HeadTensor& output = is_query ? arguments.query_output : arguments.key_output;
  const int first_head = (is_query ? group : group - arguments.query_groups) * kHeads;
  const bool turns = column_item < arguments.pair_items;
  // Two vectors: the partners of the pairs, or neighbours.
  int columns[2] = {column_item * 2 * kCount, column_item * 2 * kCount + kCount};
  if (!kInterleaved && turns) {
    columns[0] = column_item * kCount;
    columns[1] = arguments.pairs + column_item * kCount;
  }
  const bool has_second = columns[1] < arguments.head_dim;  // the last copied vector may stand alone

  ptx::Word4 loaded[kHeads][2];
  const int64_t input_start = batch * input.strides[0] + place * input.strides[1];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = min(first_head + i, input.heads - 1);
    const T* start = static_cast<const T*>(input.data) + input_start + head * input.strides[2];
    loaded[i][0] = ptx::ld_global_v4(start + columns[0]);
    if (has_second) loaded[i][1] = ptx::ld_global_v4(start + columns[1]);
  }
  float cosines[kCount], sines[kCount];
  if (turns) fill_cos_sin<T, kCount>(arguments.table, batch, place, column_item * kCount, cosines, sines);
  const int64_t output_start = batch * output.strides[0] + place * output.strides[1];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (first_head + i >= input.heads) break;
    T* start = static_cast<T*>(output.data) + output_start + (first_head + i) * output.strides[2];
    if (turns) {
      float low[kCount], high[kCount];
      tile::Vector<T>{loaded[i][0]}.unpack(low);
      tile::Vector<T>{loaded[i][1]}.unpack(high);
      if constexpr (kInterleaved) {
        rotate_interleaved_pairs(low, cosines, sines, 0);
        rotate_interleaved_pairs(high, cosines, sines, kCount / 2);
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) turn(low[j], high[j], cosines[j], sines[j]);
      }
      loaded[i][0] = tile::Vector<T>::pack(low).words;
      loaded[i][1] = tile::Vector<T>::pack(high).words;
    }
    ptx::st_global_v4(start + columns[0], loaded[i][0]);
    if (has_second) ptx::st_global_v4(start + columns[1], loaded[i][1]);
  }
}

}  // namespace kernel_pytorch::rope
