// What shapes alone do not show of sampling: the weights, which tokens each limit keeps, how often they are drawn, and
// that a row does not see its neighbours.
#include "kernel_pytorch/ops/sample/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/sample/weight_cuda.h"

namespace kernel_pytorch::sample {
namespace {

struct Numbers {
  float temperature = 1, top_p = 1, min_p = 0;
  int32_t top_k = 0;
};

// `draws` tokens of one row of logits, by seeds 0, 1, ...
std::vector<int32_t> drawn(const std::vector<float>& logits, const Numbers& numbers, int64_t draws,
                           const std::string& kernel = "cpu") {
  OwnContext context;
  context->kernel_override = kernel;
  const auto columns = static_cast<int64_t>(logits.size());
  const auto rows = static_cast<size_t>(draws);
  std::vector<float> all, temperature(rows, numbers.temperature), top_p(rows, numbers.top_p),
      min_p(rows, numbers.min_p);
  for (int64_t i = 0; i < draws; ++i) all.insert(all.end(), logits.begin(), logits.end());
  std::vector<int32_t> top_k(rows, numbers.top_k);
  std::vector<int64_t> seeds(rows);
  std::vector<int32_t> tokens(rows, -2);
  for (size_t i = 0; i < rows; ++i) seeds[i] = static_cast<int64_t>(i);
  const auto row = [&](void* data, DType dtype) { return contiguous_view(data, dtype, {draws}); };
  draw({.logits = contiguous_view(all.data(), DType::kFloat32, {draws, columns}),
        .temperature = row(temperature.data(), DType::kFloat32),
        .top_k = row(top_k.data(), DType::kInt32),
        .top_p = row(top_p.data(), DType::kFloat32),
        .min_p = row(min_p.data(), DType::kFloat32),
        .seeds = row(seeds.data(), DType::kInt64),
        .tokens = row(tokens.data(), DType::kInt32)},
       context);
  return tokens;
}

std::set<int64_t> ever_drawn(const std::vector<float>& logits, const Numbers& numbers) {
  std::set<int64_t> all;
  for (const char* kernel : {"cpu", "reference"}) {
    for (const int32_t token : drawn(logits, numbers, 400, kernel)) all.insert(token);
  }
  return all;
}

TEST(Sample, WeightsAreExponentials) {
  for (const float temperature : {0.1f, 1.0f, 7.5f}) {
    const Scale scale = scale_of(3.0f, temperature);
    for (float logit = 3; logit > 3 - 26 * temperature; logit -= 0.00731f * temperature) {
      const double exact = std::exp((double{logit} - 3.0) / double{temperature}) * 0x1p36;
      EXPECT_NEAR(static_cast<double>(weight_of(scale, logit)), exact, 1.0 + 1e-6 * exact) << logit;
      if (weight_of(scale, logit) > 0) EXPECT_GE(key_of(logit), least_key(scale));
    }
    EXPECT_EQ(weight_of(scale, 3.0f), kMostWeight);
    EXPECT_EQ(weight_of(scale, 3 - 40 * temperature), 0u);
    EXPECT_EQ(weight_of(scale, -kLargestFinite), 0u);
  }
}

TEST(Sample, KeysHaveTheOrderOfFloats) {
  const float values[] = {-kLargestFinite, -2, -1e-40f, 0, 1e-40f, 1, 3e38f, kLargestFinite};
  for (size_t i = 1; i < std::size(values); ++i) EXPECT_LT(key_of(values[i - 1]), key_of(values[i]));
  for (const float value : values) EXPECT_EQ(value_of_key(key_of(value)), value);
  EXPECT_EQ(key_of(-0.0f), key_of(0.0f));
  EXPECT_EQ(key_of(INFINITY), key_of(kLargestFinite));
  EXPECT_EQ(key_of(-INFINITY), 0u);
  EXPECT_EQ(key_of(NAN), 0u);
}

TEST(Sample, LimitsKeepWhatTheySay) {
  using Tokens = std::set<int64_t>;
  const std::vector<float> logits{std::log(0.4f), std::log(0.1f), std::log(0.3f), std::log(0.2f)};
  EXPECT_EQ(ever_drawn(logits, {}), (Tokens{0, 1, 2, 3}));
  EXPECT_EQ(ever_drawn(logits, {.top_k = 2}), (Tokens{0, 2}));
  EXPECT_EQ(ever_drawn(logits, {.top_p = 0.65f}), (Tokens{0, 2}));  // 0.4 is less, 0.7 is not
  EXPECT_EQ(ever_drawn(logits, {.top_p = 0.75f}), (Tokens{0, 2, 3}));
  EXPECT_EQ(ever_drawn(logits, {.top_p = 0.0f}), (Tokens{0}));
  EXPECT_EQ(ever_drawn(logits, {.min_p = 0.6f}), (Tokens{0, 2}));
  EXPECT_EQ(ever_drawn(logits, {.top_p = 0.5f, .top_k = 3}), (Tokens{0, 2}));  // of 0.9: 0.4 / 0.9 is less
  EXPECT_EQ(ever_drawn(logits, {.temperature = 0}), (Tokens{0}));
  EXPECT_EQ(ever_drawn({1, 5, 5, 0}, {.temperature = 0}), (Tokens{1}));
  EXPECT_EQ(ever_drawn({2, 2, 2, 1}, {.top_k = 1}), (Tokens{0, 1, 2}));  // equal logits stay together
  EXPECT_EQ(ever_drawn({NAN, -INFINITY, NAN}, {}), (Tokens{-1}));
  EXPECT_EQ(ever_drawn({NAN, -INFINITY, -5}, {}), (Tokens{2}));
  EXPECT_EQ(ever_drawn({0, INFINITY, INFINITY}, {}), (Tokens{1, 2}));
  EXPECT_EQ(ever_drawn({0, 9}, {.temperature = NAN}), (Tokens{1}));
  EXPECT_EQ(ever_drawn({0, 9}, {.temperature = INFINITY}), (Tokens{0, 1}));
}

TEST(Sample, FrequenciesAreProbabilities) {
  std::vector<float> logits;
  const std::vector<double> shares{0.35, 0.02, 0.13, 0.25, 0.05, 0.2};
  for (const double share : shares) logits.push_back(static_cast<float>(2 * std::log(share)));
  constexpr int64_t kDraws = 40'000;
  std::vector<double> counts(shares.size());
  for (const int32_t token : drawn(logits, {.temperature = 2}, kDraws)) counts[static_cast<size_t>(token)] += 1;
  double chi_squared = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    chi_squared += std::pow(counts[i] - shares[i] * kDraws, 2) / (shares[i] * kDraws);
  }
  EXPECT_LT(chi_squared, 20.5);  // 5 degrees of freedom: one in a thousand seeds
}

TEST(Sample, ARowDoesNotSeeItsNeighbours) {
  OwnContext context;
  constexpr int64_t kRows = 7, kColumns = 3001;
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(kRows * kColumns), temperature(kRows, 0.9f), top_p(kRows, 0.8f);
  for (float& logit : logits) logit = normal(random);
  std::vector<int64_t> seeds(kRows, 11), positions{4, 5, 6, 7, 8, 9, 10};
  std::vector<int32_t> together(kRows), alone(1);
  const auto draw_rows = [&](int64_t first, int64_t rows, int32_t* tokens) {
    draw({.logits = contiguous_view(logits.data() + first * kColumns, DType::kFloat32, {rows, kColumns}),
          .temperature = contiguous_view(temperature.data() + first, DType::kFloat32, {rows}),
          .top_p = contiguous_view(top_p.data() + first, DType::kFloat32, {rows}),
          .seeds = contiguous_view(seeds.data() + first, DType::kInt64, {rows}),
          .positions = contiguous_view(positions.data() + first, DType::kInt64, {rows}),
          .tokens = contiguous_view(tokens, DType::kInt32, {rows})},
         context);
  };
  draw_rows(0, kRows, together.data());
  for (int64_t row = 0; row < kRows; ++row) {
    draw_rows(row, 1, alone.data());
    EXPECT_EQ(alone[0], together[static_cast<size_t>(row)]);
  }
  EXPECT_GT(std::set<int32_t>(together.begin(), together.end()).size(), 3u);
}

TEST(Sample, RefusesWithASentence) {
  OwnContext context;
  std::vector<float> logits(6), numbers(3);
  std::vector<int32_t> tokens(2);
  Draw arguments{.logits = contiguous_view(logits.data(), DType::kFloat32, {2, 3}),
                 .temperature = contiguous_view(numbers.data(), DType::kFloat32, {3}),
                 .tokens = contiguous_view(tokens.data(), DType::kInt32, {2})};
  try {
    draw(arguments, context);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("temperature has shape [3], logits have [2, 3]"), std::string::npos)
        << error.message();
  }
}

}  // namespace
}  // namespace kernel_pytorch::sample
