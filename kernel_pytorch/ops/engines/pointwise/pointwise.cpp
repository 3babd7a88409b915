// What the pointwise ops share around their kernels: names of functions, making of problems.
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::pointwise {
std::string_view name_of(Kind kind) {
  std::string_view words = kKindWords;
  for (int i = 0; i < static_cast<int>(kind); ++i) take_token(words);
  return take_token(words);
}

std::span<const registry::Kernel<ForwardProblem>> forward_kernels() {
  static const registry::Kernel<ForwardProblem> kKernels[] = {kForwardCudaVector, kForwardCudaAny, kForwardCpu,
                                                              kForwardReference};
  return kKernels;
}

std::span<const registry::Kernel<BackwardProblem>> backward_kernels() {
  static const registry::Kernel<BackwardProblem> kKernels[] = {kBackwardCudaVector, kBackwardCudaColumns,
                                                               kBackwardCudaAny, kBackwardCpu, kBackwardReference};
  return kKernels;
}

namespace {

struct Wanted {
  Kind kind;
  double dropout;
  bool residual, packed;
  TensorView gate, up, bias, seed;  // absent where not wanted
};

Wanted parse_options(const registry::ProblemRequest& request, bool gated, std::string_view default_kind) {
  registry::check_options(request, {"kind", "bias", "bias_dtype", "residual", "dropout", "packed"});
  Wanted wanted{};
  wanted.kind =
      static_cast<Kind>(registry::choice_option(request, "kind", registry::words_of(kKindWords), default_kind));
  wanted.dropout = registry::number_option(request, "dropout", 0);
  wanted.residual = registry::flag_option(request, "residual", false);
  wanted.packed = registry::flag_option(request, "packed", false);
  KP_CHECK(gated || !wanted.packed, "option packed=1: only a gated activation has two halves");
  wanted.gate = registry::rows_view(request);
  if (wanted.packed) wanted.gate.strides[0] *= 2;
  if (gated) wanted.up = wanted.gate;
  if (registry::flag_option(request, "bias", false)) {
    const DType dtype = registry::dtype_option(request, "bias_dtype", request.dtype);
    wanted.bias = contiguous_view(nullptr, dtype, {wanted.gate.sizes[1]}, request.device);
  }
  if (wanted.dropout != 0) wanted.seed = contiguous_view(nullptr, DType::kInt64, {2}, request.device);
  return wanted;
}

}  // namespace

ForwardProblem make_forward(const registry::ProblemRequest& request, bool gated, std::string_view default_kind) {
  const Wanted wanted = parse_options(request, gated, default_kind);
  const TensorView full = registry::rows_view(request);
  return {.kind = wanted.kind,
          .dropout = wanted.dropout,
          .gate = wanted.gate,
          .up = wanted.up,
          .gate_bias = wanted.bias,
          .up_bias = gated ? wanted.bias : TensorView(),
          .residual = wanted.residual ? full : TensorView(),
          .seed = wanted.seed,
          .output = full};
}

BackwardProblem make_backward(const registry::ProblemRequest& request, bool gated, std::string_view default_kind) {
  const Wanted wanted = parse_options(request, gated, default_kind);
  return {.kind = wanted.kind,
          .dropout = wanted.dropout,
          .grad_output = registry::rows_view(request),
          .gate = wanted.gate,
          .up = wanted.up,
          .gate_bias = wanted.bias,
          .up_bias = gated ? wanted.bias : TensorView(),
          .seed = wanted.seed,
          .grad_gate = wanted.gate,
          .grad_up = wanted.up,
          .grad_gate_bias = wanted.bias,
          .grad_up_bias = gated ? wanted.bias : TensorView()};
}

}  // namespace kernel_pytorch::pointwise
