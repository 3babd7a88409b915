// The kernels of the mixture's MLPs, best first, the references last, and what the registry asks about their problems.
#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::moe_mlp {
namespace {

using registry::ProblemRequest;

// Pair (t, j) goes to expert (t + j^2 and so on) mod experts, as a routing would have it: rows sorted by expert. Where
// `drops`, every seventh pair has no row.
struct TrialRouting {
  std::vector<int32_t> chosen, rows, tokens, ends;

  TrialRouting(int64_t count, int64_t k, int64_t experts, bool drops) {
    const int64_t pairs = count * k;
    chosen.resize(static_cast<size_t>(pairs)), rows.assign(static_cast<size_t>(pairs), -1);
    tokens.assign(static_cast<size_t>(pairs), -1);
    int32_t next = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t own = (pair / k * pair / k + pair % k) % experts;
        chosen[pair] = static_cast<int32_t>(own);
        if (own != expert || (drops && pair % 7 == 3)) continue;
        tokens[next] = static_cast<int32_t>(pair / k);
        rows[pair] = next++;
      }
      ends.push_back(next);
    }
  }
};
void copy_to(const std::vector<int32_t>& values, const TensorView& view) {
  if (view.is_present()) std::copy(values.begin(), values.end(), view.as<int32_t>());
}

template <class Problem>
void set_trial_rows(const Problem& on_host) {
  constexpr bool kDrops = !std::is_same_v<Problem, ActivationBackward>;  // which leaves rows of no pair as they are
  const int64_t tokens = on_host.row_of_token.sizes[0], k = on_host.row_of_token.sizes[1];
  const TrialRouting routing(tokens, k, 3, kDrops);
  copy_to(routing.rows, on_host.row_of_token);
}
void set_trial_activation(const ActivationBackward& on_host) {
  set_trial_rows(on_host);
  if (!on_host.experts.is_present()) return;
  const int64_t experts = on_host.down_bias.sizes[0];
  for (int64_t i = 0; i < on_host.experts.element_count(); ++i) {
    on_host.experts.as<int32_t>()[i] = static_cast<int32_t>(i % experts);
  }
}
template <class Problem>
void set_trial_layer(const Problem& on_host) {
  const int64_t tokens = on_host.row_of_token.sizes[0], k = on_host.row_of_token.sizes[1];
  const TrialRouting routing(tokens, k, on_host.offsets.sizes[0], tokens % 2 == 1);
  copy_to(routing.chosen, on_host.experts);
  copy_to(routing.rows, on_host.row_of_token);
  copy_to(routing.tokens, on_host.token_of_row);
  copy_to(routing.ends, on_host.offsets);
}

struct Request {
  const ProblemRequest& given;
  explicit Request(const ProblemRequest& request, std::string_view op, size_t rank, std::string_view shape)
      : given(request) {
    KP_CHECK(request.shape.size() == rank, op, ": the shape is ", shape_text(request.shape), "; it must be ", shape);
  }
  int64_t operator[](size_t i) const { return given.shape[i]; }
  TensorView view(DType dtype, std::initializer_list<int64_t> sizes) const {
    return contiguous_view(nullptr, dtype, sizes, given.device);
  }
  TensorView view(std::initializer_list<int64_t> sizes) const { return view(given.dtype, sizes); }
  TensorView wide(std::initializer_list<int64_t> sizes) const { return view(statistic_type(given.dtype), sizes); }
  TensorView integers(std::initializer_list<int64_t> sizes) const { return view(DType::kInt32, sizes); }
  bool flag(std::string_view name, bool fallback = false) const { return registry::flag_option(given, name, fallback); }
};

Combine make_combine(const ProblemRequest& request) {
  registry::check_options(request, {"weights"});
  const Request r(request, "moe_combine", 3, "[tokens, k, columns]");
  return {.y = r.view({r[0] * r[1], r[2]}),
          .row_of_token = r.integers({r[0], r[1]}),
          .weights = r.flag("weights", true) ? r.wide({r[0], r[1]}) : TensorView{},
          .output = r.view({r[0], r[2]})};
}
CombineBackward make_combine_backward(const ProblemRequest& request) {
  const Combine forward = make_combine(request);
  return {.grad_output = forward.output,
          .y = forward.y,
          .row_of_token = forward.row_of_token,
          .weights = forward.weights,
          .grad_y = forward.y,
          .grad_weights = forward.weights};
}

template <class Problem>
void set_activation(const ProblemRequest& request, Problem& problem) {
  problem.form = static_cast<Form>(
      registry::choice_option(request, "form", registry::words_of(grouped_matmul::kFormNames), "packed_gated"));
  problem.activation = static_cast<Kind>(
      registry::choice_option(request, "activation", registry::words_of(pointwise::kKindWords), "silu"));
  problem.limit = registry::number_option(request, "limit", 0);
}

ActivationBackward make_activation(const ProblemRequest& request) {
  registry::check_options(request, {"form", "activation", "limit", "bias"});
  const Request r(request, "moe_activation_backward", 3, "[tokens, k, inner]");
  const int64_t rows = r[0] * r[1];
  ActivationBackward problem;
  set_activation(request, problem);
  const int64_t columns = problem.form == Form::kPlain ? r[2] : 2 * r[2];
  problem.grad_hidden = problem.hidden = r.view({rows, r[2]});
  problem.preactivation = problem.grad_preactivation = r.view({rows, columns});
  problem.row_of_token = r.integers({r[0], r[1]});
  problem.weights = problem.grad_weights = r.wide({r[0], r[1]});
  problem.row_weights = r.wide({rows});
  if (r.flag("bias")) {
    problem.grad_output = r.view({r[0], 40});
    problem.down_bias = r.view({3, 40});
    problem.experts = r.integers({r[0], r[1]});
  }
  return problem;
}

template <class Problem>
Problem make_layer(const ProblemRequest& request, std::string_view op) {
  const Request r(request, op, 5, "[tokens, k, in, inner, experts]");
  const int64_t tokens = r[0], k = r[1], in = r[2], inner = r[3], experts = r[4];
  Problem problem;
  set_activation(request, problem);
  problem.transposed = r.flag("transposed");
  const int64_t columns = problem.form == Form::kPlain ? inner : 2 * inner;
  problem.x = r.view({tokens, in});
  problem.gate_up = problem.transposed ? r.view({experts, columns, in}) : r.view({experts, in, columns});
  problem.down = problem.transposed ? r.view({experts, in, inner}) : r.view({experts, inner, in});
  if (r.flag("bias")) problem.gate_up_bias = r.view({experts, columns}), problem.down_bias = r.view({experts, in});
  problem.weights = r.wide({tokens, k});
  problem.experts = problem.row_of_token = r.integers({tokens, k});
  problem.offsets = r.integers({experts});
  problem.token_of_row = r.integers({tokens * k});
  problem.preactivation = r.view({tokens * k, columns});
  return problem;
}
Forward make_forward(const ProblemRequest& request) {
  registry::check_options(request, {"form", "activation", "limit", "transposed", "bias", "saved"});
  Forward problem = make_layer<Forward>(request, "moe_mlp_forward");
  problem.output = problem.x;
  if (!registry::flag_option(request, "saved", true)) problem.preactivation = {};
  return problem;
}
Backward make_backward(const ProblemRequest& request) {
  registry::check_options(request, {"form", "activation", "limit", "transposed", "bias", "x_grad"});
  Backward problem = make_layer<Backward>(request, "moe_mlp_backward");
  problem.grad_output = problem.x;
  if (registry::flag_option(request, "x_grad", true)) problem.grad_x = problem.x;
  problem.grad_gate_up = problem.gate_up, problem.grad_down = problem.down;
  problem.grad_gate_up_bias = problem.gate_up_bias, problem.grad_down_bias = problem.down_bias;
  problem.grad_weights = problem.weights;
  return problem;
}

void describe_forward(const Forward& problem, tuning::KeyBuilder& key) {
  key.field("preactivation", problem.preactivation);
}

// Gradients of weights are sums of products with rows that were rounded to the layer's type.
registry::Precision precision(const Backward& problem, std::string_view tensor, DType own) {
  return {tensor == "grad_weights" ? problem.x.dtype : own};
}

// Trials of these are small enough as they are asked for.
template <class Problem>
Problem shrink(const Problem& problem, int64_t) {
  return problem;
}

int64_t combine_flops(const Combine& problem) {
  return 2 * problem.row_of_token.element_count() * problem.y.sizes[1];
}
int64_t combine_backward_flops(const CombineBackward& problem) {
  return 3 * problem.row_of_token.element_count() * problem.y.sizes[1];
}
int64_t activation_flops(const ActivationBackward& problem) {
  return 12 * problem.row_of_token.element_count() * problem.grad_hidden.sizes[1];
}
template <class Problem>
int64_t layer_flops(const Problem& problem) {
  const int64_t experts = std::max<int64_t>(problem.gate_up.sizes[0], 1);
  return 2 * problem.row_of_token.element_count() *
         ((problem.gate_up.element_count() + problem.down.element_count()) / experts);
}
int64_t forward_flops(const Forward& problem) {
  return layer_flops(problem);
}
int64_t backward_flops(const Backward& problem) {
  return 2 * layer_flops(problem);
}

constexpr const char* kCombineShapes = R"(
  fp32 bf16 fp16: 37x4x520 3x16x64 0x2x8; 9x1x33 weights=0
  fp64: 5x2x7
)";
constexpr const char* kActivationShapes = R"(
  fp32 bf16 fp16: 37x4x520 form=plain,gated,packed_gated bias=1; 9x2x33 form=plain,gated,packed_gated activation=gelu
    37x2x264 form=gated limit=0.5; 9x2x33 form=packed_gated limit=0.5
  fp64: 5x2x7
)";
constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 70x4x72x64x6 0x2x8x8x2; 131x2x64x128x4 transposed=1 bias=1; 37x2x24x20x3 form=gated limit=0.5 bias=1
    33x1x16x24x5 form=plain activation=gelu saved=0
  bf16: 21x2x64x6144x3 transposed=1
  fp64: 7x2x6x5x3 bias=1
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 70x4x72x64x6 0x2x8x8x2; 131x2x64x128x4 transposed=1 bias=1; 37x2x24x20x3 form=gated limit=0.5 bias=1
    33x1x16x24x5 form=plain activation=gelu x_grad=0
  bf16: 21x2x64x6144x3 transposed=1
  fp64: 7x2x6x5x3 bias=1
)";

}  // namespace

constinit const registry::Operation<Combine> kCombine = registry::declared<Combine, kCombineFields, combine_flops>(
    {.name = "moe_combine_forward",
     .kernels = registry::kernel_list<kCombineCuda, kCombineCpu, kCombineReference>,
     .set_trial_inputs = set_trial_rows<Combine>,
     .make = make_combine,
     .check = check,
     .shrink = shrink<Combine>,
     .shapes = kCombineShapes});
constinit const registry::Operation<CombineBackward> kCombineBackward =
    registry::declared<CombineBackward, kCombineBackwardFields, combine_backward_flops>(
        {.name = "moe_combine_backward",
         .kernels = registry::kernel_list<kCombineBackwardCuda, kCombineBackwardCpu, kCombineBackwardReference>,
         .set_trial_inputs = set_trial_rows<CombineBackward>,
         .make = make_combine_backward,
         .check = check,
         .shrink = shrink<CombineBackward>,
         .shapes = kCombineShapes});
constinit const registry::Operation<ActivationBackward> kActivationBackward =
    registry::declared<ActivationBackward, kActivationBackwardFields, activation_flops>(
        {.name = "moe_activation_backward",
         .kernels =
             registry::kernel_list<kActivationBackwardCuda, kActivationBackwardCpu, kActivationBackwardReference>,
         .set_trial_inputs = set_trial_activation,
         .make = make_activation,
         .check = check,
         .shrink = shrink<ActivationBackward>,
         .shapes = kActivationShapes});
constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields, forward_flops>({.name = "moe_mlp_forward",
                                                                .kernels = composed_kernels<Forward, compose>,
                                                                .describe = describe_forward,
                                                                .set_trial_inputs = set_trial_layer<Forward>,
                                                                .make = make_forward,
                                                                .check = check,
                                                                .shrink = shrink<Forward>,
                                                                .shapes = kForwardShapes,
                                                                .parts = parts_of});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields, backward_flops>({.name = "moe_mlp_backward",
                                                                   .kernels = composed_kernels<Backward, compose>,
                                                                   .precision = precision,
                                                                   .set_trial_inputs = set_trial_layer<Backward>,
                                                                   .make = make_backward,
                                                                   .check = check,
                                                                   .shrink = shrink<Backward>,
                                                                   .shapes = kBackwardShapes,
                                                                   .parts = parts_of});

}  // namespace kernel_pytorch::moe_mlp
