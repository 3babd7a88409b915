// What the shape lists of operations_test.cpp cannot say of activation, gated_activation and dropout: which bits
// dropout draws, what is left alone, what does not depend on threads, and who takes a problem on a GPU.
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/dropout/dropout.h"
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::pointwise {
namespace {

struct Tensor {
  std::vector<char> memory;
  TensorView view;

  Tensor(DType dtype, std::vector<int64_t> sizes) {
    view = contiguous_view(nullptr, dtype, sizes);
    memory.resize(static_cast<size_t>(view.byte_count()) + 64);
    view.data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    std::mt19937 random(static_cast<unsigned>(view.element_count()));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < view.element_count(); ++i) store_element(view.data, dtype, i, normal(random));
  }
  double operator[](int64_t i) const { return load_element(view.data, view.dtype, i); }
};

TEST(Pointwise, DropoutDrawsTheBitsOfPhilox) {
  int64_t numbers[2] = {-7, int64_t{1} << 40};
  const TensorView seed = contiguous_view(numbers, DType::kInt64, {2});
  OwnContext pool;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int64_t columns : {1, 5, 8, 37, 2048, 5001}) {
      Tensor x(dtype, {23, columns}), output(dtype, {23, columns});
      for (int64_t i = 0; i < x.view.element_count(); ++i) store_element(x.view.data, dtype, i, 1.0);
      for (bool threaded : {false, true}) {
        OwnContext alone;
        alone->threads = nullptr;
        dropout::forward({.x = x.view, .p = 0.3, .seed = seed, .output = output.view}, threaded ? pool : alone);
        for (int64_t i = 0; i < x.view.element_count(); ++i) {
          const PhiloxBlock block = philox(static_cast<uint64_t>(-7), uint64_t{1} << 40, static_cast<uint64_t>(i / 8));
          const bool keeps = block.bits(static_cast<int>(i % 8)) >= dropout_threshold(0.3);
          ASSERT_EQ(output[i] != 0, keeps) << name_of(dtype) << " " << columns << " element " << i;
        }
      }
    }
  }
}

TEST(Pointwise, DropoutNeedsNoSeedWhereNothingIsDropped) {
  Tensor x(DType::kFloat32, {3, 9}), output(DType::kFloat32, {3, 9});
  OwnContext context;
  dropout::forward({.x = x.view, .p = 0, .seed = {}, .output = output.view}, context);
  EXPECT_EQ(std::memcmp(x.view.data, output.view.data, 27 * sizeof(float)), 0);
}

TEST(Pointwise, PackedGradientsAreWrittenBesideEachOther) {
  constexpr int64_t kRows = 9, kColumns = 50;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Tensor packed(dtype, {kRows, 2 * kColumns}), gradient(dtype, {kRows, kColumns});
    Tensor together(dtype, {kRows, 2 * kColumns + 3}), gate(dtype, {kRows, kColumns}), up(dtype, {kRows, kColumns});
    for (int64_t i = 0; i < together.view.element_count(); ++i) store_element(together.view.data, dtype, i, 77.0);
    const auto half = [&](TensorView view, int which) {
      view.sizes[1] = kColumns;
      view.data = static_cast<char*>(view.data) + which * kColumns * size_of(dtype);
      return view;
    };
    OwnContext context;
    gated_activation::Backward arguments{
        .grad_output = gradient.view, .gate = half(packed.view, 0), .up = half(packed.view, 1)};
    arguments.grad_gate = gate.view;
    arguments.grad_up = up.view;
    gated_activation::backward(arguments, context);
    arguments.grad_gate = half(together.view, 0);
    arguments.grad_up = half(together.view, 1);
    gated_activation::backward(arguments, context);
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kColumns; ++j) {
        ASSERT_EQ(together[i * (2 * kColumns + 3) + j], gate[i * kColumns + j]);
        ASSERT_EQ(together[i * (2 * kColumns + 3) + kColumns + j], up[i * kColumns + j]);
      }
      for (int64_t j = 0; j < 3; ++j) ASSERT_EQ(together[i * (2 * kColumns + 3) + 2 * kColumns + j], 77.0);
    }
  }
}

TEST(Pointwise, BiasGradientDoesNotDependOnThreads) {
  Tensor x(DType::kBFloat16, {517, 300}), gradient(DType::kBFloat16, {517, 300}), bias(DType::kFloat32, {300});
  Tensor grad_input(DType::kBFloat16, {517, 300}), first(DType::kFloat32, {300}), second(DType::kFloat32, {300});
  const auto run = [&](const TensorView& grad_bias, bool threaded) {
    OwnContext context;
    if (!threaded) context->threads = nullptr;
    activation::Backward arguments{
        .kind = activation::Kind::kSilu, .grad_output = gradient.view, .x = x.view, .bias = bias.view};
    arguments.grad_input = grad_input.view;
    arguments.grad_bias = grad_bias;
    activation::backward(arguments, context);
  };
  run(first.view, false);
  for (int repeat = 0; repeat < 20; ++repeat) {
    run(second.view, true);
    ASSERT_EQ(std::memcmp(first.view.data, second.view.data, 300 * sizeof(float)), 0);
  }
}

TEST(Pointwise, ErrorsNameTheOpBothValuesAndTheCure) {
  Tensor x(DType::kFloat32, {4, 16}), output(DType::kFloat32, {4, 16}), wide(DType::kFloat32, {4, 17});
  OwnContext context;
  const auto expect_error = [](const std::function<void()>& call, const std::string& words) {
    try {
      call();
      ADD_FAILURE() << "no error; expected: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  expect_error([&] { activation::forward({.x = x.view}, context); }, "activation: output is missing");
  expect_error([&] { activation::forward({.x = x.view, .dropout_p = 0.5, .output = output.view}, context); },
               "activation: dropout_p is 0.5 and seed is missing; give an int64 tensor of two");
  expect_error([&] { activation::forward({.x = x.view, .dropout_p = NAN, .output = output.view}, context); },
               "activation: dropout_p is nan; it must lie between 0 and 1");
  expect_error([&] { gated_activation::forward({.gate = x.view, .output = output.view}, context); },
               "gated_activation: up is missing");
  expect_error([&] { gated_activation::forward({.gate = x.view, .up = wide.view, .output = output.view}, context); },
               "gated_activation: up has shape [4, 17], gate has [4, 16]");
  expect_error([&] { activation::backward({.grad_output = x.view, .x = x.view}, context); },
               "activation: the gradient of x is missing");
  Tensor tall(DType::kFloat32, {16, 4});
  TensorView strided = tall.view;
  std::swap(strided.sizes[0], strided.sizes[1]);
  std::swap(strided.strides[0], strided.strides[1]);
  expect_error([&] { activation::backward({.grad_output = x.view, .x = x.view, .grad_input = strided}, context); },
               "activation: grad_gate has column stride 4; it must be 1");
}

TEST(Pointwise, KernelsOnAGpuSayWhyNot) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = 9;
  device.cuda.multiprocessors = 132;
  using pointwise::ForwardProblem;
  const auto chosen = [&](const ForwardProblem& problem) -> std::string_view {
    for (const auto& kernel : pointwise::forward_kernels()) {
      if (kernel.supports(problem, device)) return kernel.name;
    }
    return "none";
  };
  const auto view = [](std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, DType::kBFloat16, sizes, {DeviceKind::kCuda, 0});
  };
  ForwardProblem problem;
  problem.gate = problem.output = view({16384, 4096});
  EXPECT_EQ(chosen(problem), "cuda_vector");
  problem.gate = problem.output = view({8, 33});  // 264 elements are whole vectors, 33 columns are not
  EXPECT_EQ(chosen(problem), "cuda_vector");
  problem.gate_bias = view({33});
  EXPECT_EQ(chosen(problem), "cuda_any");
  problem.gate_bias = {};
  problem.gate.strides[0] = 40;
  EXPECT_EQ(chosen(problem), "cuda_any");
  problem.gate = problem.output = view({1 << 20, 1 << 15});  // 2^32 vectors
  EXPECT_EQ(chosen(problem), "cuda_any");
  pointwise::BackwardProblem backward;
  backward.gate = backward.grad_output = backward.grad_gate = view({64, 512});
  EXPECT_TRUE(pointwise::kBackwardCudaVector.supports(backward, device));
  EXPECT_FALSE(pointwise::kBackwardCudaColumns.supports(backward, device));
  backward.grad_gate_bias = view({512});
  EXPECT_FALSE(pointwise::kBackwardCudaVector.supports(backward, device));
  EXPECT_TRUE(pointwise::kBackwardCudaColumns.supports(backward, device));
}

TEST(Divider, IsExactBelowTwoToThe31) {
  std::mt19937 random(1);
  std::uniform_int_distribution<uint32_t> any(1, (1u << 31) - 1);
  const auto check = [](uint32_t value, uint32_t divisor) {
    ASSERT_EQ(divide(value, make_divider(divisor)), value / divisor) << value << " / " << divisor;
  };
  for (int i = 0; i < 200'000; ++i) {
    const uint32_t divisor = any(random) >> (i % 31);
    if (divisor == 0) continue;
    const uint32_t multiple = any(random) / divisor * divisor;
    for (uint32_t value : {any(random), multiple, multiple == 0 ? 0 : multiple - 1, (1u << 31) - 1, 0u}) {
      check(value, divisor);
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::pointwise
