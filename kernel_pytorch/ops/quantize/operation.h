// Quantising as the registry sees it, and the kernels that its list names. In a problem the scales have two dimensions,
// [rows or groups of rows, blocks of columns].
#pragma once

#include <cmath>

#include "kernel_pytorch/ops/quantize/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/quantize/quantize.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::quantize {

// Throws what quantize() throws; leaves the problem as described above.
void check(Quantize& problem, Device device);

extern const registry::Operation<Quantize> kQuantize;
extern const registry::Kernel<Quantize> kReference, kCpu, kCuda, kCudaRows, kComposed;

// Columns of the tensor that is quantised.
inline int64_t columns_of(const Quantize& problem) {
  return problem.x.sizes[1] * (problem.source == Source::kGateGradient ? 2 : 1);
}
inline bool has_producer(const Quantize& problem) {
  return problem.source != Source::kGiven;
}

// x is rounded as it is.
inline void remove_producer(Quantize& problem) {
  problem.source = Source::kGiven;
  for (TensorView* view : {&problem.up, &problem.grad_output, &problem.residual, &problem.weight, &problem.value,
                           &problem.sum, &problem.rstd}) {
    *view = {};
  }
}

inline DType code_type_of(const Quantize& problem) {
  return problem.codes.is_present() ? problem.codes.dtype : problem.transposed.dtype;
}
inline Format format_of(const Quantize& problem) {
  return code_type_of(problem) == DType::kFloat8E5M2 ? kE5M2 : kE4M3;
}
inline ScaleRule rule_of(const Quantize& problem) {
  return {.largest = code_type_of(problem) == DType::kFloat8E5M2 ? 57344.0f : 448.0f,
          .margin_factor = std::ldexp(1.0f, static_cast<int>(problem.margin)),
          .power_of_two = problem.power_of_two};
}
inline Granularity transposed_granularity(const Quantize& problem) {
  return problem.square_transpose ? Granularity::k128x128 : problem.granularity;
}
// Whether transposed codes have scales of their own.
inline bool has_transposed_scales(Granularity granularity) {
  return granularity == Granularity::kRow || granularity == Granularity::k1x128;
}

}  // namespace kernel_pytorch::quantize
