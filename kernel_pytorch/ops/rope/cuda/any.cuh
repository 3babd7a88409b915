// rope for whatever the vector kernel refuses: any strides, alignment and width, one pair per thread and turn. Right
// first, fast second.
#pragma once

#include "kernel_pytorch/ops/rope/cuda/table.cuh"

namespace kernel_pytorch::rope {

template <class T>
__global__ void __launch_bounds__(kThreads) rotate_any(const __grid_constant__ AnyArguments arguments) {
  const int rest = arguments.copies_rest ? arguments.head_dim - 2 * arguments.pairs : 0;
  const int64_t units = arguments.pairs + rest;  // of a head: its pairs, then the columns that are copied
  const int64_t heads = arguments.query.heads + arguments.key.heads;
  const int64_t items = arguments.batch * arguments.sequence * heads * units;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int unit = static_cast<int>(item % units);
    const int64_t row = item / units;
    int64_t head = row % heads;
    const int64_t token = row / heads;
    const int64_t batch = token / arguments.sequence, place = token % arguments.sequence;
    const bool is_query = head < arguments.query.heads;
    const HeadTensor& input = is_query ? arguments.query : arguments.key;
    const HeadTensor& output = is_query ? arguments.query_output : arguments.key_output;
    if (!is_query) head -= arguments.query.heads;
    const T* from = static_cast<const T*>(input.data) + batch * input.strides[0] + place * input.strides[1] +
                    head * input.strides[2];
    T* to =
        static_cast<T*>(output.data) + batch * output.strides[0] + place * output.strides[1] + head * output.strides[2];
    if (unit >= arguments.pairs) {
      const int64_t column = unit + arguments.pairs;
      to[column * output.strides[3]] = from[column * input.strides[3]];
      continue;
    }
    const int64_t first_column = arguments.interleaved ? 2 * unit : unit;
    const int64_t second_column = arguments.interleaved ? 2 * unit + 1 : unit + arguments.pairs;
    float cosines[1], sines[1];
    fill_cos_sin<T, 1>(arguments.table, batch, place, unit, cosines, sines);
    float first = tile::to_float<T>(from[first_column * input.strides[3]]);
    float second = tile::to_float<T>(from[second_column * input.strides[3]]);
    turn(first, second, cosines[0], sines[0]);
    to[first_column * output.strides[3]] = tile::from_float<T>(first);
    to[second_column * output.strides[3]] = tile::from_float<T>(second);
  }
}

}  // namespace kernel_pytorch::rope
