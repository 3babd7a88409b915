// Trains an MLP, then a small transformer, in C++ with LibTorch: the layers are this library's, loops and optimizers
// are torch's. Exit status 0 when both have learned what they should.
#include <cstdio>
#include <exception>

#include "kernel_pytorch/torch_modules.h"

namespace kp = kernel_pytorch::nn;
using torch::Tensor;

namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t in, int64_t hidden, int64_t out)
      : first(register_module("first", kp::Linear(kp::LinearOptions(in, hidden).activation("gelu")))),
        last(register_module("last", kp::Linear(hidden, out))) {}
  Tensor forward(const Tensor& x) { return last(first(x)); }

  kp::Linear first, last;
};
TORCH_MODULE(Mlp);

// The sum of the squares of the inputs: no linear layer learns it.
double train_mlp(torch::Device device, int steps) {
  Mlp model(8, 64, 1);
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  double last = 0;
  for (int step = 0; step < steps; ++step) {
    const Tensor x = torch::randn({256, 8}, device), y = x.square().sum(1, true);
    const Tensor loss = torch::mse_loss(model(x), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0 || step == steps - 1) std::printf("MLP          step %3d: loss %.4f\n", step, last);
  }
  return last;
}

struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl(int64_t vocabulary, int64_t width)
      : embedding(register_module("embedding", torch::nn::Embedding(vocabulary, width))),
        block(register_module("block", kp::TransformerBlock(width, 4, 2 * width))),
        norm(register_module("norm", kp::RMSNorm(width))),
        head(register_module("head", kp::Linear(kp::LinearOptions(width, vocabulary).bias(false)))) {}
  Tensor forward(const Tensor& ids) { return head(norm(block(embedding(ids)))); }

  torch::nn::Embedding embedding;
  kp::TransformerBlock block;
  kp::RMSNorm norm;
  kp::Linear head;
};
TORCH_MODULE(LanguageModel);

// Each number is the sum of the two before it, modulo 16: the model has to look back.
double train_transformer(torch::Device device, int steps) {
  constexpr int64_t kVocabulary = 16, kBatch = 32, kLength = 17;
  LanguageModel model(kVocabulary, 64);
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  double last = 0;
  for (int step = 0; step < steps; ++step) {
    Tensor ids = torch::randint(kVocabulary, {kBatch, kLength}, torch::kLong);
    for (int64_t i = 2; i < kLength; ++i)
      ids.select(1, i) = (ids.select(1, i - 1) + ids.select(1, i - 2)) % kVocabulary;
    ids = ids.to(device);
    const Tensor logits = model(ids.narrow(1, 1, kLength - 2)).flatten(0, 1);
    const Tensor loss = torch::nn::functional::cross_entropy(logits, ids.narrow(1, 2, kLength - 2).flatten());
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0 || step == steps - 1) std::printf("transformer  step %3d: loss %.4f\n", step, last);
  }
  return last;
}

}  // namespace

int main() {
  try {
    torch::manual_seed(0);
    const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
    const double mlp = train_mlp(device, 300), transformer = train_transformer(device, 300);
    return mlp < 1 && transformer < 1 ? 0 : 1;  // untrained: about 80 and 2.8
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
