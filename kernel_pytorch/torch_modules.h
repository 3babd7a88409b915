// Layers for LibTorch programs, on the kernels of torch.ops.kernel_pytorch: RMSNorm, Linear, Attention,
// TransformerBlock as torch::nn modules with autograd. Header only: your build compiles it, with your torch (2.11 or
// later) and its ABI.
//
//   find_package(Torch REQUIRED)
//   find_package(kernel_pytorch REQUIRED)                  # after Torch: gives kernel_pytorch::torch_modules
//   target_link_libraries(mine PRIVATE kernel_pytorch::torch_modules ${TORCH_LIBRARIES})
//
// Tensors are on the CPU or on CUDA, fp32, bf16 or fp16 (on the CPU also fp64), parameters of the input's type. Errors
// are c10::Error with the op's sentence. There are first derivatives; taking a second one throws.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kernel_pytorch::nn {

using torch::Tensor;

namespace detail {

// What an op of the library is given; everything else is absent, false, zero or empty.
using Named = std::initializer_list<std::pair<const char*, c10::IValue>>;

inline c10::IValue absent(const c10::Argument& argument) {
  switch (argument.type()->kind()) {
    case c10::TypeKind::BoolType:
      return false;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return int64_t{0};
    case c10::TypeKind::FloatType:
      return 0.0;
    case c10::TypeKind::StringType:
      return std::string();
    case c10::TypeKind::ListType:
      return c10::List<Tensor>();
    case c10::TypeKind::OptionalType:
      return c10::IValue();
    default:
      TORCH_CHECK(false, "kernel_pytorch: the op's argument ", argument.name(), " was not given");
  }
}

// torch.ops.kernel_pytorch.<name>, arguments by name.
inline std::vector<c10::IValue> call(const char* name, Named given) {
  const std::string full = std::string("kernel_pytorch::") + name;
  const auto op = c10::Dispatcher::singleton().findSchema({full, ""});
  TORCH_CHECK(op.has_value(), full, " is not there: link kernel_pytorch::torch_modules, which loads ",
              "libkernel_pytorch_torch.so");
  std::vector<c10::IValue> stack;
  for (const c10::Argument& argument : op->schema().arguments()) {
    const auto* const found =
        std::find_if(given.begin(), given.end(), [&](const auto& one) { return argument.name() == one.first; });
    stack.push_back(found != given.end() ? found->second : absent(argument));
  }
  const at::AutoDispatchBelowAutograd below;  // gradients are the Functions' below
  op->callBoxed(stack);
  return stack;
}

inline Tensor or_none(const std::vector<c10::IValue>& results, size_t index, bool wanted) {
  return wanted ? results[index].toTensor() : Tensor();
}
inline std::optional<Tensor> optional(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}
// Without a last stride of 1 an op asks for a copy.
inline Tensor dense_last(const Tensor& tensor) {
  return tensor.dim() > 0 && tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor;
}
inline void refuse_second_derivative(const char* op) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "kernel_pytorch::nn::", op,
              " has no second derivative; call backward without create_graph, or take torch::nn's layer");
}

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct RMSNormFunction : torch::autograd::Function<RMSNormFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps) {
    const auto results = call("rms_norm_forward", {{"x", x}, {"weight", weight}, {"eps", eps}});
    ctx->save_for_backward({x, weight, results[1].toTensor()});
    return results[0].toTensor();
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    refuse_second_derivative("RMSNorm");
    const auto saved = ctx->get_saved_variables();
    const bool of_x = ctx->needs_input_grad(0), of_weight = ctx->needs_input_grad(1);
    const auto results = call("rms_norm_backward", {{"grad_output", grads[0]},
                                                    {"value", saved[0]},
                                                    {"weight", saved[1]},
                                                    {"rstd", saved[2]},
                                                    {"input_grad", of_x},
                                                    {"weight_grad", of_weight}});
    return {or_none(results, 0, of_x), or_none(results, 1, of_weight), Tensor()};
  }
};

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& residual, const std::string& activation, bool gated) {
    const Tensor rows = dense_last(x);
    const auto results = call("linear_forward", {{"x", rows},
                                                 {"weight", weight},
                                                 {"bias", bias},
                                                 {"residual", residual},
                                                 {"activation", activation},
                                                 {"gated", gated},
                                                 {"precision", "full"}});
    ctx->save_for_backward({rows, weight, bias.value_or(Tensor()), results[1].toTensor()});
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["gated"] = gated;
    ctx->saved_data["residual"] = residual.has_value();
    return results[0].toTensor();
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    refuse_second_derivative("Linear");
    const auto saved = ctx->get_saved_variables();
    // Edges are those of the tensors that were given.
    const bool has_bias = saved[2].defined(), has_residual = ctx->saved_data["residual"].toBool();
    const bool of_x = ctx->needs_input_grad(0), of_weight = ctx->needs_input_grad(1);
    const bool of_bias = has_bias && ctx->needs_input_grad(2);
    const bool of_residual = has_residual && ctx->needs_input_grad(has_bias ? 3 : 2);
    const auto results = call("linear_backward", {{"grad_output", dense_last(grads[0])},
                                                  {"x", saved[0]},
                                                  {"weight", saved[1]},
                                                  {"bias", has_bias ? c10::IValue(saved[2]) : c10::IValue()},
                                                  {"preactivation", saved[3]},
                                                  {"activation", ctx->saved_data["activation"]},
                                                  {"gated", ctx->saved_data["gated"]},
                                                  {"precision", "full"},
                                                  {"input_grad", of_x},
                                                  {"weight_grad", of_weight},
                                                  {"bias_grad", of_bias}});
    return {or_none(results, 0, of_x),
            or_none(results, 1, of_weight),
            or_none(results, 2, of_bias),
            of_residual ? grads[0] : Tensor(),
            Tensor(),
            Tensor()};
  }
};

// query, key, value: [batch, sequence, heads, size]; key heads may be fewer.
struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                        bool causal) {
    const Tensor q = dense_last(query), k = dense_last(key), v = dense_last(value);
    const auto results = call("attention_forward", {{"query", q},
                                                    {"key", k},
                                                    {"value", v},
                                                    {"causal", causal},
                                                    {"window_left", int64_t{-1}},
                                                    {"window_right", int64_t{-1}},
                                                    {"return_lse", true}});
    ctx->save_for_backward({q, k, v, results[0].toTensor(), results[1].toTensor()});
    ctx->saved_data["causal"] = causal;
    return results[0].toTensor();
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    refuse_second_derivative("Attention");
    const auto saved = ctx->get_saved_variables();
    const auto results = call("attention_backward", {{"grad_output", dense_last(grads[0])},
                                                     {"query", saved[0]},
                                                     {"key", saved[1]},
                                                     {"value", saved[2]},
                                                     {"output", saved[3]},
                                                     {"lse", saved[4]},
                                                     {"causal", ctx->saved_data["causal"]},
                                                     {"window_left", int64_t{-1}},
                                                     {"window_right", int64_t{-1}}});
    return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor(), Tensor()};
  }
};

}  // namespace detail

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, in one pass. The parameter is torch::nn::RMSNorm's.
class RMSNormImpl : public torch::nn::Module {
 public:
  explicit RMSNormImpl(int64_t size, double eps = 1e-6)
      : weight(register_parameter("weight", torch::ones({size}))), eps_(eps) {}
  Tensor forward(const Tensor& x) { return detail::RMSNormFunction::apply(x, weight, eps_); }

  Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

struct LinearOptions {
  LinearOptions(int64_t in, int64_t out) : in_features(in), out_features(out) {}
  int64_t in_features, out_features;
  TORCH_ARG(bool, bias) = true;
  // identity, gelu, gelu_tanh, silu, relu, relu_squared, sigmoid or tanh
  TORCH_ARG(std::string, activation) = "identity";
  // Rows of the weight are pairs (gate, up), activation(gate) * up is taken of each: half as many columns come out.
  TORCH_ARG(bool, gated) = false;
};

// activation(x weight^T + bias) + residual: what surrounds the product is part of its kernel. Parameters are
// torch::nn::Linear's.
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(int64_t in, int64_t out) : LinearImpl(LinearOptions(in, out)) {}
  explicit LinearImpl(LinearOptions options)
      : weight(register_parameter("weight", torch::empty({options.out_features, options.in_features}))),
        options_(std::move(options)) {
    bias = options_.bias() ? register_parameter("bias", torch::empty({options_.out_features}))
                           : register_parameter("bias", Tensor(), /*requires_grad=*/false);
    const double bound = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(options_.in_features, 1)));
    torch::nn::init::uniform_(weight, -bound, bound);
    if (bias.defined()) torch::nn::init::uniform_(bias, -bound, bound);
  }
  Tensor forward(const Tensor& x, const Tensor& residual = {}) {
    return detail::LinearFunction::apply(x, weight, detail::optional(bias), detail::optional(residual),
                                         options_.activation(), options_.gated());
  }

  Tensor weight, bias;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())})  // for torch::nn::Sequential

 private:
  LinearOptions options_;
};
TORCH_MODULE(Linear);

// Self attention of [batch, sequence, width], without the scores in memory. `residual` is added to the result.
class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(int64_t width, int64_t heads, bool causal = true)
      : qkv(register_module("qkv", Linear(LinearOptions(width, 3 * width).bias(false)))),
        out(register_module("out", Linear(LinearOptions(width, width).bias(false)))),
        heads_(heads),
        causal_(causal) {
    TORCH_CHECK(heads > 0 && width % heads == 0, "kernel_pytorch::nn::Attention: width is ", width,
                ", which must be a multiple of the heads, ", heads);
  }
  Tensor forward(const Tensor& x, const Tensor& residual = {}) {
    TORCH_CHECK(x.dim() == 3, "kernel_pytorch::nn::Attention: x has ", x.dim(),
                " dimensions; it must be [batch, sequence, width]");
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, heads_, x.size(2) / heads_}).unbind(2);
    return out->forward(detail::AttentionFunction::apply(parts[0], parts[1], parts[2], causal_).flatten(2), residual);
  }

  Linear qkv, out;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())})

 private:
  int64_t heads_;
  bool causal_;
};
TORCH_MODULE(Attention);

// x + attention(norm(x)), then x + mlp(norm(x)) with a SwiGLU: both residuals are part of the products before them.
class TransformerBlockImpl : public torch::nn::Module {
 public:
  TransformerBlockImpl(int64_t width, int64_t heads, int64_t hidden, bool causal = true)
      : attention_norm(register_module("attention_norm", RMSNorm(width))),
        attention(register_module("attention", Attention(width, heads, causal))),
        mlp_norm(register_module("mlp_norm", RMSNorm(width))),
        gate_up(register_module("gate_up",
                                Linear(LinearOptions(width, 2 * hidden).bias(false).activation("silu").gated(true)))),
        down(register_module("down", Linear(LinearOptions(hidden, width).bias(false)))) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = attention->forward(attention_norm(x), x);
    return down->forward(gate_up(mlp_norm(y)), y);
  }

  RMSNorm attention_norm;
  Attention attention;
  RMSNorm mlp_norm;
  Linear gate_up, down;
};
TORCH_MODULE(TransformerBlock);

}  // namespace kernel_pytorch::nn
