// kernel_pytorch/torch_modules.h against torch's own ops, values and gradients in fp64. The example is part of this
// program, so that torch's headers are compiled once.
#define main example_main
#include "../../examples/libtorch/train.cpp"
#undef main

#include <cstring>
#include <functional>
#include <string>

namespace {

int failures = 0;

void expect(bool holds, const std::string& what) {
  if (!holds) std::printf("FAILED %s\n", what.c_str()), ++failures;
}

void expect_close(const Tensor& result, const Tensor& expected, const std::string& what) {
  expect(result.sizes() == expected.sizes() && torch::allclose(result, expected, 1e-9, 1e-9), what);
}

// Both functions of x, and of the parameters: results and gradients.
void compare(const std::string& name, const std::function<Tensor(const Tensor&)>& ours,
             const std::function<Tensor(const Tensor&)>& theirs, const Tensor& x, std::vector<Tensor> parameters) {
  parameters.push_back(x);
  const Tensor result = ours(x), expected = theirs(x);
  expect_close(result, expected, name);
  const Tensor weights = torch::randn_like(expected);
  const auto grads = torch::autograd::grad({result}, parameters, {weights});
  const auto right = torch::autograd::grad({expected}, parameters, {weights});
  for (size_t i = 0; i < grads.size(); ++i) expect_close(grads[i], right[i], name + ", gradient " + std::to_string(i));
}

void expect_error(const std::string& words, const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    expect(std::strstr(error.what(), words.c_str()) != nullptr, "an error says \"" + words + "\": " + error.what());
    return;
  }
  expect(false, "an error that says \"" + words + "\"");
}

Tensor leaf(std::vector<int64_t> sizes) {
  return torch::randn(sizes, torch::kDouble).requires_grad_();
}

Tensor plain_norm(const Tensor& x, const kp::RMSNorm& norm) {
  return x * torch::rsqrt(x.square().mean(-1, true) + 1e-6) * norm->weight;
}

Tensor plain_attention(const Tensor& x, const kp::Attention& layer, int64_t heads) {
  const auto parts =
      torch::linear(x, layer->qkv->weight).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4}).unbind();
  const Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
  return torch::linear(mixed.transpose(1, 2).flatten(2), layer->out->weight);
}

void check_layers() {
  kp::RMSNorm norm(24);
  norm->to(torch::kDouble);
  compare(
      "RMSNorm", [&](const Tensor& x) { return norm(x); }, [&](const Tensor& x) { return plain_norm(x, norm); },
      leaf({3, 5, 24}), norm->parameters());

  for (const bool has_bias : {false, true}) {
    kp::Linear layer(kp::LinearOptions(12, 20).bias(has_bias).activation("gelu"));
    layer->to(torch::kDouble);
    const Tensor residual = leaf({4, 20});
    auto parameters = layer->parameters();
    parameters.push_back(residual);
    const std::string name = has_bias ? "Linear with a bias" : "Linear without a bias";
    compare(
        name, [&](const Tensor& x) { return layer->forward(x.t(), residual); },
        [&](const Tensor& x) { return torch::gelu(torch::linear(x.t(), layer->weight, layer->bias)) + residual; },
        leaf({12, 4}), parameters);
  }

  kp::TransformerBlock block(32, 4, 48);
  block->to(torch::kDouble);
  const auto plain = [&](const Tensor& x) {
    const Tensor y = x + plain_attention(plain_norm(x, block->attention_norm), block->attention, 4);
    const Tensor pairs = torch::linear(plain_norm(y, block->mlp_norm), block->gate_up->weight).unflatten(-1, {-1, 2});
    return y + torch::linear(torch::silu(pairs.select(-1, 0)) * pairs.select(-1, 1), block->down->weight);
  };
  compare(
      "TransformerBlock", [&](const Tensor& x) { return block(x); }, plain, leaf({2, 7, 32}), block->parameters());
}

void check_use() {
  torch::nn::Sequential stack(kp::Linear(8, 6), kp::RMSNorm(6), kp::Linear(6, 2));
  expect(stack->forward(torch::randn({3, 8})).sizes() == torch::IntArrayRef({3, 2}), "layers in a Sequential");
  kp::Linear half(8, 4);
  half->weight.set_requires_grad(false);
  const Tensor x = torch::randn({3, 8}).requires_grad_();
  half(x).sum().backward();
  expect(x.grad().defined() && !half->weight.grad().defined(), "a frozen weight gets no gradient");
  expect_error("8", [&] { half(torch::randn({3, 9})); });
  expect_error("multiple of the heads", [] { kp::Attention(10, 4); });
  expect_error("no second derivative", [&] { torch::autograd::grad({half(x).sum()}, {x}, {}, true, true); });
}

}  // namespace

int main() {
  torch::manual_seed(1);
  check_layers();
  check_use();
  std::printf("%d of the comparisons failed\n", failures);
  return failures > 0 ? 1 : example_main();
}
