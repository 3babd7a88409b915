// Requests of every op pass the op's own checks, and `supports` answers for every kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/explain.h"
#include "kernel_pytorch/registry/host_call.h"

namespace kernel_pytorch {
namespace {

using registry::AnyOperation;
using registry::ProblemRequest;

std::string refusal_of(const AnyOperation& operation, const ProblemRequest& request) {
  try {
    operation.make(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << operation.name << ": " << error.message();
    return error.message();
  }
  return "";
}

// What the op is called in its messages: "rms_norm_forward" says "rms_norm: ...".
std::string spoken_name(const AnyOperation& operation) {
  std::string name = operation.name;
  for (const std::string end : {"_forward", "_backward", "_rescale"}) {
    if (name.ends_with(end)) name.resize(name.size() - end.size());
  }
  return name;
}

TEST(Requests, ATypeThatAnOpDoesNotTakeIsRefusedByTheOp) {
  for (const AnyOperation& operation : operations()) {
    for (const DType dtype : {DType::kInt64, DType::kInt32}) {
      ProblemRequest request = operation.shapes().front();
      if (request.dtype == dtype) continue;  // of indices
      request.dtype = dtype;
      const std::string message = refusal_of(operation, request);
      EXPECT_NE(message.find(name_of(dtype)), std::string::npos) << operation.name << ": " << message;
      // A composed op's type is its GEMM's business.
      const bool is_layer = spoken_name(operation) != "linear_attention" &&
                            (operation.name.starts_with("linear") || operation.name.starts_with("mlp"));
      EXPECT_TRUE(message.starts_with(is_layer ? "matmul" : spoken_name(operation)))
          << operation.name << ": " << message;
    }
  }
}

TEST(Requests, AShapeWithoutOrWithTooManyDimensionsIsRefused) {
  for (const AnyOperation& operation : operations()) {
    ProblemRequest request = operation.shapes().front();
    const size_t rank = request.shape.size();
    request.shape = {};
    EXPECT_NE(refusal_of(operation, request).find("shape"), std::string::npos) << operation.name;
    // Those of two dimensions, and these, have any number of leading ones.
    const bool has_any = rank == 2 || operation.name.starts_with("softmax") || operation.name.starts_with("linear") ||
                         operation.name.starts_with("mlp") || operation.name == "matmul";
    if (has_any) continue;
    request.shape = std::vector<int64_t>(8, 2);
    EXPECT_NE(refusal_of(operation, request).find("shape"), std::string::npos) << operation.name;
  }
}

TEST(Requests, AWordThatAnOpDoesNotKnowIsRefused) {
  for (const AnyOperation& operation : operations()) {
    ProblemRequest request = operation.shapes().front();
    request.options.emplace_back("colour", "red");
    EXPECT_NE(refusal_of(operation, request).find("option colour=red: unknown"), std::string::npos) << operation.name;
  }
}

struct BadOption {
  std::string_view op;
  std::vector<std::pair<std::string, std::string>> options;
  std::string_view words;  // of the op's own message
};

TEST(Requests, AnImpossibleOptionIsRefusedByTheOp) {
  const BadOption cases[] = {
      {"rms_norm_forward", {{"weight_dtype", "int32"}}, "rms_norm: weight is int32"},
      {"layer_norm_forward", {{"eps", "-1"}}, "layer_norm: eps is -1"},
      {"layer_norm_backward", {{"weight_dtype", "e4m3"}}, "weight is e4m3"},
      {"cross_entropy_forward", {{"label_smoothing", "2"}}, "cross_entropy: label_smoothing is 2"},
      {"cross_entropy_backward", {{"softcap", "-1"}}, "cross_entropy: softcap is -1"},
      {"optimizer_step", {{"storage", "plain"}, {"master", "1"}}, "a correction goes with neither master nor seed"},
      {"optimizer_step", {{"storage", "plain"}, {"state", "int8"}}, "optimizer_step: states are int8"},
      {"activation_forward", {{"dropout", "2"}}, "activation: dropout_p is 2"},
      {"activation_backward", {{"bias", "1"}, {"bias_dtype", "int8"}}, "activation: bias is int8"},
      {"gated_activation_forward", {{"kind", "tanh"}}, "gated_activation: kind is \"tanh\""},
      {"gated_activation_backward", {{"kind", "tanh"}}, "gated_activation: kind is \"tanh\""},
      {"dropout", {{"p", "-0.5"}}, "dropout: dropout_p is -0.5"},
      {"embedding_forward", {{"indices", "fp32"}}, "embedding: indices are fp32"},
      {"embedding_backward", {{"rows", "10"}, {"padding", "10"}}, "embedding: padding_index is 10"},
      {"chunk_mean_pool_forward", {{"chunk", "-2"}}, "chunk_mean_pool: chunk_size is -2"},
      {"chunk_mean_pool_backward", {{"chunk", "0"}}, "chunk_mean_pool: chunk_size is 0"},
      {"rope", {{"rotary_dim", "3"}}, "rope: rotary_dim is 3"},
      {"rope", {{"table_dtype", "int8"}}, "rope: cos is int8"},
      {"attention_forward", {{"key_heads", "3"}}, "attention: query has"},
      {"block_select", {{"sparsity", "2"}}, "block_select: sparsity is 2"},
      {"matmul", {{"precision", "tf32"}}, "matmul: precision \"tf32\" is a GPU's"},
      {"matmul", {{"bias", "int8"}}, "matmul: bias is int8"},
      {"matmul", {{"saved", "1"}}, "matmul: saved is given"},
      {"quantize", {{"margin", "40"}}, "quantize: margin is 40"},
      {"quantize", {{"code", "bf16"}}, "quantize: codes is bf16"},
      {"quantize", {{"square", "1"}}, "quantize: square_transpose is set"},
      {"quantize", {{"codes", "0"}, {"transposed", "0"}}, "quantize: neither codes nor transposed"},
      {"scaled_matmul", {{"a", "bf16"}}, "scaled_matmul: a is bf16"},
      {"scaled_matmul", {{"bias", "int8"}}, "scaled_matmul: bias is int8"},
      {"linear_forward", {{"bias_dtype", "int8"}}, "matmul: bias is int8"},
      {"linear_forward", {{"gated", "1"}}, "linear: weight has shape [129, "},
  };
  for (const BadOption& bad : cases) {
    const AnyOperation* operation = find_operation(bad.op);
    ASSERT_NE(operation, nullptr) << bad.op;
    ProblemRequest request = operation->shapes().front();
    if (bad.options.front().first == "gated") request.shape[1] = 129;
    for (const auto& option : bad.options) {
      std::erase_if(request.options, [&](const auto& one) { return one.first == option.first; });
      request.options.push_back(option);
    }
    const std::string message = refusal_of(*operation, request);
    EXPECT_NE(message.find(bad.words), std::string::npos) << bad.op << ": " << message;
  }
}

// Where an op has no kernel for a type on a GPU, every kernel says why; the request itself is right.
// On no device.
bool takes_no_double(std::string_view name) {
  constexpr std::string_view kBeginnings[] = {"block",       "scaled_",     "optimizer_step",  "moe_permute",
                                              "gradient_",   "sparse_",     "paged_attention", "append_kv",
                                              "plan_decode", "mla_decode",  "attention_fp8",   "merge_attention",
                                              "sample",      "int8_matmul", "delayed_scales",  "lightning_indexer"};
  return name.find("quant") != std::string_view::npos ||
         std::ranges::any_of(kBeginnings, [&](std::string_view one) { return name.starts_with(one); });
}

TEST(Supports, EveryKernelAnswersWithYesOrAReason) {
  DeviceInfo hopper;
  hopper.device = {DeviceKind::kCuda, 0};
  hopper.cuda.compute_major = 9;
  hopper.cuda.multiprocessors = 132;
  hopper.cuda.shared_bytes_per_block = 227 << 10;
  for (const AnyOperation& operation : operations()) {
    ProblemRequest request = operation.shapes().front();
    const auto on_cpu = operation.supports(request);
    ASSERT_EQ(on_cpu.size(), operation.kernel_names.size());
    EXPECT_TRUE(on_cpu.back().supported) << operation.name;
    EXPECT_TRUE(on_cpu.back().is_fallback) << operation.name;
    request.device = hopper.device;
    for (const DType dtype : {request.dtype, DType::kFloat64}) {
      if (dtype == DType::kFloat64 && takes_no_double(operation.name)) continue;
      request.dtype = dtype;
      bool is_taken = false;
      for (const registry::KernelSupport& kernel : registry::supports(*operation.make_on(request, hopper))) {
        EXPECT_EQ(kernel.supported, kernel.reason.empty()) << operation.name << " " << kernel.kernel;
        is_taken |= kernel.supported;
      }
      if (dtype != DType::kFloat64) continue;
      EXPECT_EQ(is_taken, registry::computes_double_on_gpu(operation.name)) << operation.name;
    }
  }
}

// A member that an op does not have may be of any type: read as a tensor, it sent calls of norms in bf16 to the host.
TEST(Declarations, NoTensorIsPresentBeforeOneIsGiven) {
  for (const registry::Declaration& declaration : declarations()) {
    void* arguments = const_cast<void*>(declaration.defaults());
    for (const Field& field : declaration.fields.all) {
      if (!field.is_tensor()) continue;
      EXPECT_FALSE(field.tensor(arguments).is_present()) << declaration.name << ": " << field.name;
      EXPECT_EQ(field.tensor(arguments).data, nullptr) << declaration.name << ": " << field.name;
    }
  }
}

TEST(Supports, AVendorsKernelIsFasterThanAFallback) {
  const AnyOperation& matmul = *find_operation("matmul");
  const auto first = [&](DType dtype) {
    for (const registry::KernelSupport& kernel : matmul.supports({.shape = {128, 128, 128}, .dtype = dtype})) {
      if (kernel.supported) return kernel;
    }
    return registry::KernelSupport{};
  };
  EXPECT_FALSE(first(DType::kFloat32).is_fallback) << first(DType::kFloat32).kernel;
  EXPECT_FALSE(first(DType::kBFloat16).is_fallback) << first(DType::kBFloat16).kernel;
  EXPECT_TRUE(first(DType::kFloat64).is_fallback) << first(DType::kFloat64).kernel;
}

}  // namespace
}  // namespace kernel_pytorch
