// rope as the registry sees it: the problem that its kernels take, checked and brought into one form.
#pragma once

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::rope {

struct Problem {
  int64_t rotary_dim = 0;
  bool interleaved = false;
  bool inverse = false;
  bool in_place = false;  // the outputs are the inputs
  double scale = 1;
  TensorView query{};  // [batch, sequence, heads, head_dim], any strides
  TensorView key{};    // absent, or the same with heads of its own
  TensorView cos{};    // [batch, rows, width], batch of stride 0 where all share one table
  TensorView sin{};
  TensorView inverse_frequencies{};  // [rotary_dim / 2] where there is no table
  TensorView positions{};            // [batch, sequence] or absent
  TensorView query_output{};         // columns of stride 1; absent where in_place
  TensorView key_output{};

  const TensorView& output_of_query() const { return in_place ? query : query_output; }
  const TensorView& output_of_key() const { return in_place ? key : key_output; }
  int64_t batch() const { return query.sizes[0]; }
  int64_t sequence() const { return query.sizes[1]; }
  int64_t head_dim() const { return query.sizes[3]; }
  int64_t pairs() const { return rotary_dim / 2; }
  // Elements from one pair's cos to the next pair's.
  int64_t table_step() const { return interleaved && cos.is_present() && cos.size(2) == rotary_dim ? 2 : 1; }
};

// Throws what rotate() throws; leaves tables as described above.
void check(Problem& problem, Device device);

extern const registry::Operation<Problem> kRotate;
extern const registry::Kernel<Problem> kReference, kCpu, kCudaVector, kCudaAny;

}  // namespace kernel_pytorch::rope
