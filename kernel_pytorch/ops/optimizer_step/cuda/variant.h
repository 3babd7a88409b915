// What the GPU kernels' host sides share: which code a step is compiled for, and the launches of a list.
#pragma once

#include <functional>
#include <string>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/optimizer_step.h"

struct CUkern_st;

namespace kernel_pytorch::optimizer_step {

struct Variant {
  Rule rule;
  Storage storage;
  DType dtype;
  bool has_narrow_states;  // plain, of 16 bits
  WeightBits weight_bits;
  bool has_maximum;

  int index() const;
  DType state_type() const;  // of plain states
  int state_bytes() const;   // of any
  int unit() const;
  bool is_possible() const;   // what check() lets through
  std::string types() const;  // the kernels' template arguments up to weight_bits
};
inline constexpr int kVariants = kRules * kStorages * 3 * 2 * 3 * 2;
Variant variant_at(int index);
Variant variant_of(const Step& step);

struct Chunks {
  int elements;   // of a chunk
  int alignment;  // in bytes, that a tensor needs to be taken in whole chunks; 0: a unit, at most 16
};
// One launch for every 330 parameters, after a memset of the counters by which the last block knows itself.
void launch_list(const Step& step, const Variant& variant, Chunks chunks, Context& context,
                 const std::function<void(int64_t chunks, Arguments& arguments)>& launch);

}  // namespace kernel_pytorch::optimizer_step
