// What shapes alone do not show of the routing: ties, NaN, capacity, rows that no thread may change, bad arguments.
#include "kernel_pytorch/ops/moe_routing/moe_routing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::moe_routing {
namespace {

struct Routed {
  int64_t tokens, experts, k;
  std::vector<float> logits, weights;
  std::vector<int32_t> chosen, offsets, counts, token_of_row, row_of_token;
  int32_t dropped = -1;
  float aux_loss = -1, z_loss = -1;

  Routed(std::vector<float> values, int64_t experts_each, int64_t chosen_each)
      : tokens(static_cast<int64_t>(values.size()) / experts_each),
        experts(experts_each),
        k(chosen_each),
        logits(std::move(values)) {}

  Forward arguments() {
    const auto pairs = static_cast<size_t>(tokens * k), all = static_cast<size_t>(experts);
    weights.assign(pairs, -1), chosen.assign(pairs, -1), row_of_token.assign(pairs, -2), token_of_row.assign(pairs, -2);
    offsets.assign(all, -1), counts.assign(all, -1);
    return {.logits = contiguous_view(logits.data(), DType::kFloat32, {tokens, experts}),
            .k = k,
            .weights = contiguous_view(weights.data(), DType::kFloat32, {tokens, k}),
            .experts = contiguous_view(chosen.data(), DType::kInt32, {tokens, k}),
            .offsets = contiguous_view(offsets.data(), DType::kInt32, {experts}),
            .counts = contiguous_view(counts.data(), DType::kInt32, {experts}),
            .token_of_row = contiguous_view(token_of_row.data(), DType::kInt32, {tokens * k}),
            .row_of_token = contiguous_view(row_of_token.data(), DType::kInt32, {tokens, k}),
            .dropped = contiguous_view(&dropped, DType::kInt32, {}),
            .aux_loss = contiguous_view(&aux_loss, DType::kFloat32, {}),
            .z_loss = contiguous_view(&z_loss, DType::kFloat32, {})};
  }
};

TEST(MoeRouting, TiesGoToTheLowerIndexAndNanComesLast) {
  OwnContext context;
  const float nan = std::nanf(""), lowest = -INFINITY;
  Routed routed({1, 2, 2, 2, nan, 0, 0, -1, lowest, lowest, lowest, lowest}, 4, 2);
  for (const char* kernel : {"cpu", "reference"}) {
    context->kernel_override = kernel;
    forward(routed.arguments(), context);
    EXPECT_EQ(routed.chosen, (std::vector<int32_t>{1, 2, 1, 2, 0, 1})) << kernel;
    EXPECT_EQ(routed.offsets, (std::vector<int32_t>{1, 4, 6, 6})) << kernel;
    EXPECT_EQ(routed.token_of_row, (std::vector<int32_t>{2, 0, 1, 2, 0, 1})) << kernel;
    EXPECT_EQ(routed.row_of_token, (std::vector<int32_t>{1, 4, 2, 5, 0, 3})) << kernel;
  }
}

TEST(MoeRouting, CapacityKeepsTheFirstAndCountsTheRest) {
  OwnContext context;
  Routed routed({9, 0, 9, 0, 9, 0, 0, 9}, 2, 1);
  Forward arguments = routed.arguments();
  arguments.capacity = 2;
  forward(arguments, context);
  EXPECT_EQ(routed.row_of_token, (std::vector<int32_t>{0, 1, -1, 2}));
  EXPECT_EQ(routed.token_of_row, (std::vector<int32_t>{0, 1, 3, -1}));
  EXPECT_EQ(routed.counts, (std::vector<int32_t>{3, 1}));
  EXPECT_EQ(routed.offsets, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(routed.dropped, 1);
  EXPECT_EQ(routed.weights, (std::vector<float>{1, 1, 0, 1}));
}

TEST(MoeRouting, BalancedExpertsHaveALossOfOne) {
  OwnContext context;
  Routed routed(std::vector<float>(64, 0.0f), 4, 4);
  forward(routed.arguments(), context);
  EXPECT_NEAR(routed.aux_loss, 1.0f, 1e-6f);
  EXPECT_NEAR(routed.z_loss, std::log(4.0f) * std::log(4.0f), 1e-6f);
}

TEST(MoeRouting, ThreadsDoNotShow) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> logits(700 * 24);
  for (float& logit : logits) logit = normal(random);
  OwnContext context;
  Routed first(logits, 24, 3), second(logits, 24, 3);
  forward(first.arguments(), context);
  context->threads = nullptr;
  forward(second.arguments(), context);
  EXPECT_EQ(first.weights, second.weights);
  EXPECT_EQ(first.token_of_row, second.token_of_row);
  EXPECT_EQ(first.aux_loss, second.aux_loss);
  EXPECT_EQ(first.z_loss, second.z_loss);
}

TEST(MoeRouting, BadArgumentsSayWhatToDo) {
  OwnContext context;
  Routed routed({0, 1, 2, 3}, 4, 2);
  const auto message = [&](auto change) {
    Forward arguments = routed.arguments();
    change(arguments);
    try {
      forward(arguments, context);
    } catch (const Error& error) {
      return std::string(error.message());
    }
    return std::string();
  };
  EXPECT_NE(message([](Forward& a) { a.k = 5; }).find("k is 5 of 4 experts"), std::string::npos);
  EXPECT_NE(message([](Forward& a) { a.groups = 3; }).find("4 experts are in 3 groups"), std::string::npos);
  EXPECT_NE(message([](Forward& a) { a.groups = 4; }).find("k is 2, but 1 groups"), std::string::npos);
  EXPECT_NE(message([](Forward& a) { a.capacity = -1; }).find("capacity is -1"), std::string::npos);
  EXPECT_NE(message([](Forward& a) { a.offsets.dtype = DType::kInt64; }).find("offsets is int64"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::moe_routing
