// torch.ops.kernel_pytorch.quantize_, quantize_produced_ and scaled_matmul: FP8 codes with their scales, and products
// of them. Shape functions are Python's (python/kernel_pytorch/_ops/float8.py); neither is part of a graph, the layers
// over them are.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/quantize/quantize.h"
#include "kernel_pytorch/ops/scaled_matmul/scaled_matmul.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using quantize::Granularity;

Granularity granularity_of(const std::string& word) {
  if (word == "tensor") return Granularity::kTensor;
  if (word == "row") return Granularity::kRow;
  if (word == "1x128") return Granularity::k1x128;
  KP_CHECK(word == "128x128", "quantize: granularity is \"", word, "\"; known are tensor, row, 1x128 and 128x128");
  return Granularity::k128x128;
}

DType dtype_of(std::string_view op, const std::string& word) {
  const auto dtype = parse_dtype(word);
  KP_CHECK(dtype.has_value(), op, ": \"", word, "\" is no type; known are e4m3, e5m2, fp32, bf16 and fp16");
  return *dtype;
}

// What both ops are given. Written is what is present of codes to found_nonfinite, which the caller has made (python:
// with rows 16 bytes apart).
quantize::Quantize quantize_of(const TensorView& x, const TensorView& scale, const ParameterView& seed,
                               const TensorView& codes, const TensorView& transposed, const TensorView& scales,
                               const TensorView& transposed_scales, const TensorView& amax,
                               const TensorView& found_nonfinite, const std::string& granularity, int64_t margin,
                               bool power_of_two, bool square_transpose) {
  constexpr int64_t kFarAway = 1 << 20;  // quantize refuses what is much nearer; beyond int it must not wrap around
  return {.x = x,
          .scale = scale,
          .seed = seed,
          .granularity = granularity_of(granularity),
          .margin = static_cast<int>(std::clamp(margin, -kFarAway, kFarAway)),
          .power_of_two = power_of_two,
          .square_transpose = square_transpose,
          .codes = codes,
          .transposed = transposed,
          .scales = scales,
          .transposed_scales = transposed_scales,
          .amax = amax,
          .found_nonfinite = found_nonfinite};
}

void quantize_into(Call& call, const TensorView& x, const TensorView& scale, const ParameterView& seed,
                   const TensorView& codes, const TensorView& transposed, const TensorView& scales,
                   const TensorView& transposed_scales, const TensorView& amax, const TensorView& found_nonfinite,
                   const std::string& granularity, int64_t margin, bool power_of_two, bool square_transpose) {
  quantize::quantize(quantize_of(x, scale, seed, codes, transposed, scales, transposed_scales, amax, found_nonfinite,
                                 granularity, margin, power_of_two, square_transpose),
                     call.context());
}

quantize::Source source_of(const std::string& word) {
  if (word == "norm") return quantize::Source::kNorm;
  if (word == "gate") return quantize::Source::kGate;
  KP_CHECK(word == "gate_gradient", "quantize: source is \"", word, "\"; known are norm, gate and gate_gradient");
  return quantize::Source::kGateGradient;
}

// The same of what is made of x on the way.
void quantize_produced_into(Call& call, const TensorView& x, const TensorView& up, const TensorView& grad_output,
                            const TensorView& residual, const ParameterView& weight, const TensorView& scale,
                            const ParameterView& seed, const TensorView& value, const TensorView& sum,
                            const TensorView& rstd, const TensorView& codes, const TensorView& transposed,
                            const TensorView& scales, const TensorView& transposed_scales, const TensorView& amax,
                            const TensorView& found_nonfinite, const std::string& source, const std::string& kind,
                            double eps, double weight_offset, const std::string& granularity, int64_t margin,
                            bool power_of_two, bool square_transpose) {
  quantize::Quantize arguments = quantize_of(x, scale, seed, codes, transposed, scales, transposed_scales, amax,
                                             found_nonfinite, granularity, margin, power_of_two, square_transpose);
  arguments.producer = {.source = source_of(source),
                        .kind = activation::kind_of(kind, "quantize"),
                        .eps = eps,
                        .weight_offset = weight_offset,
                        .up = up,
                        .grad_output = grad_output,
                        .residual = residual,
                        .weight = weight,
                        .value = value,
                        .sum = sum,
                        .rstd = rstd};
  quantize::quantize(arguments, call.context());
}

void multiply(Call& call, const DenseView& a, const DenseView& b, const TensorView& scale_a, const TensorView& scale_b,
              const ParameterView& bias, const TensorView& output_scale, const std::string& dtype, bool accurate) {
  KP_CHECK(a.rank == 2 && b.rank == 2, "scaled_matmul: a and b are ", to_string(a), " and ", to_string(b),
           "; they must be matrices [m, k] and [n, k]");
  const int64_t sizes[] = {a.sizes[0], b.sizes[0]};
  scaled_matmul::multiply({.a = a,
                           .b = b,
                           .scale_a = scale_a,
                           .scale_b = scale_b,
                           .bias = bias,
                           .output_scale = output_scale,
                           .accurate = accurate,
                           .output = call.output(sizes, dtype_of("scaled_matmul", dtype))},
                          call.context());
}

using Ops = OpList<Op<"quantize_(Tensor x, Tensor? scale, Tensor? seed, Tensor(a!)? codes, Tensor(b!)? transposed, "
                      "Tensor(c!)? scales, Tensor(d!)? transposed_scales, Tensor(e!)? amax, "
                      "Tensor(f!)? found_nonfinite, str granularity, int margin, bool power_of_two, "
                      "bool square_transpose) -> ()",
                      quantize_into>,
                   Op<"quantize_produced_(Tensor x, Tensor? up, Tensor? grad_output, Tensor? residual, Tensor? weight, "
                      "Tensor? scale, Tensor? seed, Tensor(g!)? value, Tensor(h!)? sum, Tensor(i!)? rstd, "
                      "Tensor(a!)? codes, Tensor(b!)? transposed, Tensor(c!)? scales, Tensor(d!)? transposed_scales, "
                      "Tensor(e!)? amax, Tensor(f!)? found_nonfinite, str source, str kind, float eps, "
                      "float weight_offset, str granularity, int margin, bool power_of_two, bool square_transpose) "
                      "-> ()",
                      quantize_produced_into>,
                   Op<"scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, "
                      "Tensor? output_scale, str dtype, bool accurate) -> Tensor",
                      multiply>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
