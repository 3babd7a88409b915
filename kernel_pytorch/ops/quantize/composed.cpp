// A fused producer as two ops: the norm, gate or gradient into memory, then quantize of that. For CPUs, where
// FP8 is for trying it, and on a GPU for what the fused kernel does not take.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantize {
namespace {

registry::Support supports(const Quantize& problem, const DeviceInfo& device) {
  if (device.is_cuda() && float8_obstacle(device) != nullptr) return registry::Support::no(float8_obstacle(device));
  return registry::Support::unless(has_producer(problem) ? nullptr : "nothing is to be made of x first");
}

TensorView half_of(const TensorView& value, int64_t columns, int half) {
  TensorView view = value;
  view.sizes[1] = columns;
  view.data = value.as<char>() + half * columns * size_of(value.dtype);
  return view;
}

void make(const Quantize& problem, const TensorView& value, Context& context) {
  if (problem.source == Source::kNorm) {
    return rms_norm::forward({.x = problem.x,
                              .residual = problem.residual,
                              .weight = problem.weight,
                              .eps = problem.eps,
                              .weight_offset = problem.weight_offset,
                              .output = value,
                              .sum = problem.sum,
                              .rstd = problem.rstd},
                             context);
  }
  if (problem.source == Source::kGate) {
    return gated_activation::forward({.kind = problem.kind, .gate = problem.x, .up = problem.up, .output = value},
                                     context);
  }
  const int64_t columns = problem.x.sizes[1];
  gated_activation::backward({.kind = problem.kind,
                              .grad_output = problem.grad_output,
                              .gate = problem.x,
                              .up = problem.up,
                              .grad_gate = half_of(value, columns, 0),
                              .grad_up = half_of(value, columns, 1)},
                             context);
}

void run(const Quantize& problem, int, Context& context) {
  const int64_t rows = problem.x.sizes[0], columns = columns_of(problem);
  Context inner = context;  // the choice of this kernel is not the inner ones'
  inner.kernel_override = {};
  Quantize given = problem;
  remove_producer(given);
  given.x = problem.value;
  if (!given.x.is_present()) {
    const auto bytes = static_cast<size_t>(rows * columns * size_of(problem.x.dtype));
    given.x = contiguous_view(context.scratch->allocate(bytes), problem.x.dtype, {rows, columns}, problem.x.device);
  }
  make(problem, given.x, inner);
  quantize(given, inner);
}

uint64_t code_version() {
  return hash_text("quantize composed 1");
}

}  // namespace

constinit const registry::Kernel<Quantize> kComposed{
    .name = "composed", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantize
