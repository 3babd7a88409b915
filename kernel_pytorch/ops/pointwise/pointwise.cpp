// What the pointwise ops share around their kernels: names of functions, the tuning key, tensors, cost, making of
// problems.
#include "kernel_pytorch/ops/pointwise/pointwise.h"

#include <algorithm>
#include <array>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/request_words.h"

namespace kernel_pytorch::pointwise {
namespace {

constexpr std::array<std::string_view, kKindCount> kNames = {"gelu",         "gelu_tanh", "silu", "relu",
                                                             "relu_squared", "sigmoid",   "tanh", "identity"};

}  // namespace

std::string_view name_of(Kind kind) {
  return kNames[static_cast<size_t>(kind)];
}

bool parse_kind(std::string_view word, Kind& kind) {
  const auto found = std::ranges::find(kNames, word);
  if (found == kNames.end()) return false;
  kind = static_cast<Kind>(found - kNames.begin());
  return true;
}

std::string_view kind_words() {
  return "gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh, identity";
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

void describe(const ForwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.gate)));
  key.field("columns", columns_of(problem.gate));
  key.field("dtype", problem.gate.dtype);
  key.field("kind", static_cast<int64_t>(problem.kind));
  key.field("up", problem.up);
  key.field("gate_bias", problem.gate_bias);
  key.field("up_bias", problem.up_bias);
  key.field("residual", problem.residual);
  key.field("seed", problem.seed);
  key.field("dense", problem.gate.rank == 2 && problem.gate.strides[1] == 1);
}

void describe(const BackwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.gate)));
  key.field("columns", columns_of(problem.gate));
  key.field("dtype", problem.gate.dtype);
  key.field("kind", static_cast<int64_t>(problem.kind));
  key.field("up", problem.up);
  key.field("gate_bias", problem.gate_bias);
  key.field("up_bias", problem.up_bias);
  key.field("seed", problem.seed);
  key.field("grad_gate", problem.grad_gate);
  key.field("grad_up", problem.grad_up);
  key.field("grad_gate_bias", problem.grad_gate_bias);
  key.field("grad_up_bias", problem.grad_up_bias);
  key.field("dense", problem.gate.rank == 2 && problem.gate.strides[1] == 1);
}

void visit_tensors(ForwardProblem& problem, TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
  using enum registry::Role;
  call("gate", kInput, problem.gate);
  call("up", kInput, problem.up);
  call("gate_bias", kInput, problem.gate_bias);
  call("up_bias", kInput, problem.up_bias);
  call("residual", kInput, problem.residual);
  call("seed", kInput, problem.seed);
  call("output", kOutput, problem.output);
}

void visit_tensors(BackwardProblem& problem, TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
  using enum registry::Role;
  call("grad_output", kInput, problem.grad_output);
  call("gate", kInput, problem.gate);
  call("up", kInput, problem.up);
  call("gate_bias", kInput, problem.gate_bias);
  call("up_bias", kInput, problem.up_bias);
  call("seed", kInput, problem.seed);
  call("grad_gate", kOutput, problem.grad_gate);
  call("grad_up", kOutput, problem.grad_up);
  call("grad_gate_bias", kOutput, problem.grad_gate_bias);
  call("grad_up_bias", kOutput, problem.grad_up_bias);
}

namespace {

// Keeps the first rows of every [rows, columns] view.
void keep_rows(std::initializer_list<TensorView*> views, int64_t elements) {
  const TensorView first = **views.begin();
  if (first.rank != 2) return;
  const int64_t rows =
      std::clamp<int64_t>(elements / std::max<int64_t>(first.sizes[1], 1), 1, std::max<int64_t>(first.sizes[0], 1));
  for (TensorView* view : views) {
    if (view->is_present()) view->sizes[0] = std::min(view->sizes[0], rows);
  }
}

}  // namespace

ForwardProblem shrink(const ForwardProblem& problem, int64_t elements) {
  ForwardProblem small = problem;
  keep_rows({&small.gate, &small.up, &small.residual, &small.output}, elements);
  return small;
}

BackwardProblem shrink(const BackwardProblem& problem, int64_t elements) {
  BackwardProblem small = problem;
  keep_rows({&small.gate, &small.up, &small.grad_output, &small.grad_gate, &small.grad_up}, elements);
  return small;
}

// The operations of a polynomial and an exponential, roughly: what counts is the bytes.
registry::Cost cost(const ForwardProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 20 * problem.gate.element_count()};
}
registry::Cost cost(const BackwardProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 30 * problem.gate.element_count()};
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
  wanted.kind = static_cast<Kind>(registry::word_option(
      request, "kind", {kNames[0], kNames[1], kNames[2], kNames[3], kNames[4], kNames[5], kNames[6], kNames[7]},
      default_kind));
  wanted.dropout = registry::number_option(request, "dropout", 0);
  KP_CHECK(wanted.dropout >= 0 && wanted.dropout <= 1, "option dropout=", wanted.dropout,
           ": it must lie between 0 and 1");
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
  if (wanted.dropout > 0) wanted.seed = contiguous_view(nullptr, DType::kInt64, {2}, request.device);
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
