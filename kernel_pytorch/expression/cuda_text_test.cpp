// What is printed compiles with NVRTC, without a warning or a spill, and says what the program says.
#include "kernel_pytorch/expression/cuda_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cuda/primitives_fixture_test.h"
#include "kernel_pytorch/cuda/tile/captures_cuda.h"
#include "kernel_pytorch/expression/interpret.h"
#include "kernel_pytorch/expression/random_program_test.h"
#include "kernel_pytorch/expression/text.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::expression {
namespace {

using testing::kTestCaptures;
using testing::ProgramDrawer;
using testing::RandomTensor;

DeviceCode probe_code(bool gradient, const std::string& text) {
  return {.source = "kernel_pytorch/expression/cuda_text_probe.cuh",
          .entry = concat("kernel_pytorch::expression_probe::apply<", gradient ? "true" : "false", ">"),
          .generated = text};
}

TEST(ExpressionCuda, OneStatementAnOperation) {
  const Program alibi = parse(
      "expression 1\ncapture bf16 1\n%0 = score\n%1 = head\n%2 = load 0 %1\n%3 = key\n%4 = query\n%5 = sub %3 %4\n"
      "%6 = mul %2 %5\n%7 = add %0 %6\nreturn %7\n");
  EXPECT_EQ(cuda_text({.score_mod = &alibi}), R"(#pragma once
#include "kernel_pytorch/cuda/tile/scalar.cuh"
namespace kernel_pytorch::generated {
namespace scalar = tile::scalar;
__device__ __forceinline__ float score_mod(float score, int32_t batch, int32_t head, int32_t query, int32_t key, const tile::CapturedTensor* captures) {
  const float v2 = scalar::float_at<tile::BFloat16>(captures[0], scalar::offset_of(captures[0], head));
  const int32_t v5 = key - query;
  const float v6 = static_cast<float>(v5);
  const float v7 = v2 * v6;
  const float v8 = score + v7;
  return v8;
}
}  // namespace kernel_pytorch::generated
)");
}

TEST(ExpressionCuda, WideIntegersAndDivisions) {
  const Program program = parse(
      "expression 1\n%0 = query\n%1 = key\n%2 = mul %0 %1\n%3 = int 64\n%4 = floor_div %0 %3\n%5 = sub %0 %1\n"
      "%6 = mod %5 %3\n%7 = lt %2 %4\n%8 = lt %6 %4\n%9 = and %7 %8\nreturn %9\n");
  const std::string text = cuda_text({.mask_mod = &program});
  EXPECT_NE(text.find("int64_t v2 = static_cast<int64_t>(query) * static_cast<int64_t>(key)"), std::string::npos)
      << text;
  EXPECT_NE(text.find("int32_t v4 = query / 64"), std::string::npos) << text;
  EXPECT_NE(text.find("int32_t v6 = scalar::modulo(v5, 64)"), std::string::npos) << text;
  EXPECT_NE(text.find("bool v9 = v7 && v8"), std::string::npos) << text;
}

TEST(ExpressionCuda, RefusesWhatAGpuCannotDo) {
  const auto refused = [](const CudaFunctions& functions) {
    try {
      cuda_text(functions);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  const Program wide = parse("expression 1\ncapture fp64 0\n%0 = load 0\nreturn %0\n");
  const Program plain = parse("expression 1\n%0 = score\nreturn %0\n");
  const Program causal = parse("expression 1\n%0 = query\n%1 = key\n%2 = le %1 %0\nreturn %2\n");
  EXPECT_NE(refused({.score_mod = &wide}).find("fp64"), std::string::npos);
  EXPECT_NE(refused({.score_mod = &causal}).find("must give one float"), std::string::npos);
  EXPECT_NE(refused({.score_mod = &wide, .mask_mod = &causal}).find("trace them together"), std::string::npos);
  EXPECT_EQ(refused({.score_mod = &plain, .mask_mod = &causal}), "");
}

TEST(ExpressionCuda, RandomProgramsCompile) {
  if (!jit::nvrtc_info(true).found) GTEST_SKIP() << jit::nvrtc_info().absence;
  std::mt19937 random(7);
  for (int i = 0; i < 8; ++i) {
    const Program score = ProgramDrawer(random, false).draw(60, Type::kFloat);
    const Program mask = ProgramDrawer(random, false).draw(60, Type::kBool);
    const Gradient gradient = differentiate(score);
    const std::string text = cuda_text({.score_mod = &score, .mask_mod = &mask, .score_mod_gradient = &gradient});
    for (bool is_gradient : {false, true}) {
      const jit::CompiledKernel kernel = jit::compile(probe_code(is_gradient, text), i % 2 ? "sm_90a" : "sm_80");
      EXPECT_EQ(kernel.spill_bytes, 0) << kernel.log;
      EXPECT_EQ(kernel.warnings, "") << text;
    }
  }
}

// Captured tensors on the host and on the device, and gradients there.
struct CapturedOnDevice {
  std::vector<RandomTensor> tensors;
  std::vector<TensorView> views;
  std::vector<std::unique_ptr<OnDevice<unsigned char>>> memory;
  std::vector<std::unique_ptr<OnDevice<float>>> gradients;
  struct {
    tile::CapturedTensor list[8];
  } parameter{};

  explicit CapturedOnDevice(std::mt19937& random) {
    for (const Capture& capture : kTestCaptures) tensors.emplace_back(random, capture);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorView& view = views.emplace_back(tensors[i].view());
      memory.push_back(std::make_unique<OnDevice<unsigned char>>(tensors[i].bytes()));
      gradients.push_back(std::make_unique<OnDevice<float>>(std::vector<float>(view.element_count(), 0.0f)));
      tile::CapturedTensor& entry = parameter.list[i];
      entry.data = memory[i]->data();
      entry.gradient = gradients[i]->data();
      std::copy_n(view.strides.begin(), kMaxRank, entry.strides);
      std::copy_n(view.sizes.begin(), kMaxRank, entry.sizes);
    }
  }
};

using ExpressionOnGpu = CudaPrimitivesTest;

TEST_F(ExpressionOnGpu, ComputesWhatTheInterpreterDoes) {
  constexpr int kQueries = 5, kKeys = 64, kBatch = 1, kHead = 2;
  std::mt19937 random(31);
  for (int round = 0; round < 10; ++round) {
    const Program score = ProgramDrawer(random, true).draw(30, Type::kFloat);
    const Program mask = ProgramDrawer(random, true).draw(30, Type::kBool);
    const Gradient gradient = differentiate(score);
    const std::string text = cuda_text({.score_mod = &score, .mask_mod = &mask, .score_mod_gradient = &gradient});
    CapturedOnDevice captured(random);
    std::vector<float> scores(kQueries * kKeys);
    std::normal_distribution<float> normal;
    for (float& value : scores) value = normal(random);
    const OnDevice<float> results(scores), same_scores(scores), grad(std::vector<float>(scores.size(), 2.0f));
    launch_code(probe_code(false, text), shape_of(kQueries, kKeys), results.data(), grad.data(), kKeys, kBatch, kHead,
                captured.parameter);
    launch_code(probe_code(true, text), shape_of(kQueries, kKeys), same_scores.data(), grad.data(), kKeys, kBatch,
                kHead, captured.parameter);
    const std::vector<float> changed = results.read(), slopes = grad.read();
    std::vector<std::vector<double>> sums;
    for (const TensorView& view : captured.views) sums.emplace_back(view.element_count(), 0.0);
    for (int at = 0; at < kQueries * kKeys; ++at) {
      const Inputs<double> inputs{scores[at], kBatch, kHead, at / kKeys, at % kKeys};
      const bool is_kept = interpret<double>(mask, inputs, captured.views)[0].boolean;
      const double expected = is_kept ? interpret<double>(score, inputs, captured.views)[0].real : -1e30;
      ASSERT_NEAR(changed[at], expected, 2e-4 * (1 + std::abs(expected))) << print(score) << print(mask);
      const auto derivatives = interpret<double>(gradient.program, inputs, captured.views);
      ASSERT_NEAR(slopes[at], 2 * derivatives[0].real, 1e-3 * (1 + std::abs(derivatives[0].real))) << print(score);
      for (const LoadGradient& load : gradient.loads) {
        const TensorView& view = captured.views[load.capture];
        int64_t offset = 0;
        for (int d = 0; d < view.rank; ++d) {
          offset = offset * view.sizes[d] + place_of(derivatives[load.indices + d].integer, view.sizes[d]);
        }
        sums[load.capture][offset] += 2 * derivatives[load.derivative].real;
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      const std::vector<float> computed = captured.gradients[i]->read();
      for (size_t e = 0; e < sums[i].size(); ++e) {
        ASSERT_NEAR(computed[e], sums[i][e], 2e-3 * (10 + std::abs(sums[i][e]))) << print(score);
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::expression
