#include "kernel_pytorch/plan/activation_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

// input -> a -> b -> c: three ops; backward reads c, b, a and the input, in this order.
BlockKind small_chain() {
  return {.activations = {{.bytes = 10, .dies = 3, .can_move = true, .reads = {3}},
                          {.bytes = 100,
                           .op = 0,
                           .dies = 2,
                           .recompute_us = 5,
                           .can_recompute = true,
                           .can_move = true,
                           .inputs = {0},
                           .reads = {2}},
                          {.bytes = 200,
                           .op = 1,
                           .dies = 3,
                           .recompute_us = 1,
                           .can_recompute = true,
                           .can_move = true,
                           .inputs = {1},
                           .reads = {1}},
                          {.bytes = 50,
                           .op = 2,
                           .dies = 3,
                           .recompute_us = 9,
                           .can_recompute = true,
                           .can_move = true,
                           .inputs = {2},
                           .reads = {0}}},
          .forward_us = 15,
          .backward_us = 30,
          .forward_bytes = {100, 300, 250},
          .backward_at = {0, 0, 0, 0},
          .backward_greatest = {20, 20, 20, 20}};
}

using enum Treatment;

TEST(ActivationPlan, FollowsTheTimelineOfOneBlock) {
  const BlockKind kind = small_chain();
  const BlockOption all = simulate_block(kind, {kKeep, kKeep, kKeep, kKeep});
  EXPECT_EQ(all.held_bytes, 360);
  EXPECT_EQ(all.forward_peak, 350) << "a is dead after op 1 unless it is kept: 250 + 100";
  EXPECT_EQ(all.backward_peak, 380);
  EXPECT_EQ(all.recompute_us, 0);
  // b is made of a at event 1, when c is gone: input 10, a 100, b 200, the rest 20.
  const BlockOption one = simulate_block(kind, {kKeep, kKeep, kRecompute, kKeep});
  EXPECT_EQ(one.held_bytes, 160);
  EXPECT_EQ(one.recompute_us, 1);
  EXPECT_EQ(one.backward_peak, 330);
  // c asks for b, which asks for a: all are made at event 0 and live until they are read.
  const BlockOption none = simulate_block(kind, {kKeep, kRecompute, kRecompute, kRecompute});
  EXPECT_EQ(none.held_bytes, 10);
  EXPECT_EQ(none.recompute_us, 15);
  EXPECT_EQ(none.backward_peak, 380);
  EXPECT_EQ(none.forward_peak, 300);
  const BlockOption moved = simulate_block(kind, {kMove, kKeep, kMove, kKeep});
  EXPECT_EQ(moved.held_bytes, 150);
  EXPECT_EQ(moved.moved_bytes, 210);
}

TEST(ActivationPlan, TakesWhatFitsAndSaysWhatDoesNot) {
  ActivationRequest request{.kinds = {small_chain()},
                            .chain = {{.kind = 0, .forward_start = 1000, .backward_start = 1000},
                                      {.kind = 0, .forward_start = 1000, .backward_start = 1000}},
                            .between = 1000,
                            .outside = 500,
                            .budget_bytes = 5000,
                            .step_us = 90};
  const ActivationPlan all = plan_activations(request);
  EXPECT_TRUE(all.fits);
  EXPECT_EQ(all.step_us, 90);
  EXPECT_EQ(all.peak_bytes, 1740) << "1000 and the first block's 360 and the second's 380";
  request.budget_bytes = 1539;
  const ActivationPlan less = plan_activations(request);
  EXPECT_TRUE(less.fits);
  EXPECT_LE(less.peak_bytes, 1539);
  EXPECT_EQ(less.recompute_us, 2) << "b in both: 1000 + 160 + 330; in one alone it is 160 + 380 or 360 + 330";
  request.budget_bytes = 100;
  const ActivationPlan never = plan_activations(request);
  EXPECT_FALSE(never.fits);
  EXPECT_EQ(never.peak_bytes, never.least_bytes);
  EXPECT_NE(never.reason.find("smallest peak"), std::string::npos);
  request.chain[0].kind = 3;
  EXPECT_THROW(plan_activations(request), Error);
}

TEST(ActivationPlan, MovesWhatTheLinkHides) {
  ActivationRequest request{.kinds = {small_chain()},
                            .chain = std::vector<ChainBlock>(6),
                            .budget_bytes = 900,
                            .to_host = 200 / 15e-6,  // 200 bytes while a neighbour computes
                            .to_device = 200 / 15e-6};
  const ActivationPlan plan = plan_activations(request);
  EXPECT_TRUE(plan.fits);
  EXPECT_GT(plan.moved_bytes, 0);
  EXPECT_EQ(plan.blocks.back().moved_bytes, 0) << "the last block's backward follows at once";
  request.to_host = request.to_device = 0;
  const ActivationPlan without = plan_activations(request);
  EXPECT_EQ(without.moved_bytes, 0);
  EXPECT_GT(without.step_us, plan.step_us);
}

BlockKind random_kind(std::mt19937& random, int nodes) {
  const auto below = [&](int limit) { return static_cast<int64_t>(random() % static_cast<unsigned>(limit)); };
  BlockKind kind{.forward_us = 10.0 + static_cast<double>(below(20)),
                 .backward_us = 20.0 + static_cast<double>(below(40))};
  const int events = nodes + 1;
  for (int i = 0; i < nodes; ++i) {
    Activation one{.bytes = 1.0 + static_cast<double>(below(100)), .op = i - 1, .dies = i + below(nodes)};
    one.can_move = below(2) == 0;
    if (i > 0) {
      one.recompute_us = 1.0 + static_cast<double>(below(10));
      one.can_recompute = below(4) != 0;
      one.inputs.push_back(below(i));
      if (below(3) == 0) one.inputs.push_back(below(i));
    }
    for (int64_t count = below(3); count > 0; --count) one.reads.push_back(below(events));
    kind.activations.push_back(one);
    if (i > 0) kind.forward_bytes.push_back(static_cast<double>(below(150)));
  }
  for (int k = 0; k < events; ++k) {
    kind.backward_at.push_back(static_cast<double>(below(30)));
    kind.backward_greatest.push_back(kind.backward_at.back() + static_cast<double>(below(30)));
  }
  return kind;
}

// All ways of all blocks, every treatment tried for every activation; what is needed and not there is no way.
class Exhaustive {
 public:
  explicit Exhaustive(const ActivationRequest& request) : request_(request) {
    for (const BlockKind& kind : request.kinds) ways_.push_back(ways_of(kind));
  }

  double least_us() {
    visit(0, 0, 0, nullptr);
    return best_;
  }

 private:
  static std::vector<BlockOption> ways_of(const BlockKind& kind) {
    std::vector<BlockOption> found;
    const size_t count = kind.activations.size();
    for (size_t code = 0; code < size_t{1} << (2 * count); ++code) {
      std::vector<Treatment> treatments;
      for (size_t i = 0; i < count; ++i) treatments.push_back(static_cast<Treatment>(code >> (2 * i) & 3));
      bool is_way = true;
      std::vector<char> needed(count);
      for (size_t i = count; i-- > 0;) {
        const Activation& one = kind.activations[i];
        needed[i] |= static_cast<char>(!one.reads.empty());
        is_way &= (treatments[i] != kNone) == static_cast<bool>(needed[i]);
        is_way &= treatments[i] != kMove || one.can_move;
        is_way &= treatments[i] != kRecompute || one.can_recompute;
        if (treatments[i] == kRecompute) {
          for (int64_t input : one.inputs) needed[static_cast<size_t>(input)] = 1;
        }
      }
      if (is_way) found.push_back(simulate_block(kind, treatments));
    }
    return found;
  }

  void visit(size_t block, double held, double us, const BlockOption* before) {
    if (block == request_.chain.size()) {
      best_ = std::min(best_, us);
      return;
    }
    const ChainBlock& place = request_.chain[block];
    const bool is_last = block + 1 == request_.chain.size();
    const BlockKind& kind = request_.kinds[static_cast<size_t>(place.kind)];
    for (const BlockOption& way : ways_[static_cast<size_t>(place.kind)]) {
      if (is_last && way.moved_bytes > 0) continue;
      const double moving = before == nullptr ? 0 : before->moved_bytes;
      double stall = 0;
      if (moving > 0) {
        stall = std::max(0.0, moving / request_.to_host * 1e6 - kind.forward_us) +
                std::max(0.0, moving / request_.to_device * 1e6 - kind.backward_us - way.recompute_us);
      }
      const double forward = place.forward_start + held + moving + way.forward_peak;
      const double backward = place.backward_start + held + moving + way.backward_peak;
      const double between = is_last ? request_.between + held + way.held_bytes : 0;
      if (std::max({forward, backward, between}) > request_.budget_bytes) continue;
      visit(block + 1, held + way.held_bytes, us + way.recompute_us + stall, &way);
    }
  }

  const ActivationRequest& request_;
  std::vector<std::vector<BlockOption>> ways_;
  double best_ = 1e30;
};

TEST(ActivationPlan, EqualsExhaustiveSearch) {
  std::mt19937 random(7);
  int tight = 0, exact = 0;
  for (int round = 0; round < 60; ++round) {
    ActivationRequest request{
        .kinds = {random_kind(random, 4), random_kind(random, 3)}, .between = 20, .to_host = 4e6, .to_device = 3e6};
    for (int b = 0; b < 3; ++b) {
      request.chain.push_back({.kind = static_cast<int64_t>(random() % 2),
                               .forward_start = static_cast<double>(random() % 40),
                               .backward_start = static_cast<double>(random() % 40)});
    }
    request.budget_bytes = 1e9;
    const ActivationPlan free = plan_activations(request);
    for (double share : {0.0, 0.3, 0.7}) {
      request.budget_bytes = free.least_bytes + share * (free.everything_bytes - free.least_bytes);
      const ActivationPlan plan = plan_activations(request);
      ASSERT_TRUE(plan.fits) << round;
      ASSERT_LE(plan.peak_bytes, request.budget_bytes);
      const double least_us = Exhaustive(request).least_us();
      exact += plan.is_exact;
      if (plan.is_exact) {
        ASSERT_NEAR(plan.step_us, least_us, 1e-6) << round << " at " << share;
      } else {
        ASSERT_LE(plan.step_us, 1.02 * least_us + 1e-6);
      }
      tight += least_us > 0;
      request.budget_bytes = free.least_bytes - 1.5;
      ASSERT_EQ(Exhaustive(request).least_us(), 1e30) << "nothing has a smaller peak than the smallest";
    }
  }
  EXPECT_GT(tight, 60);
  EXPECT_GT(exact, 170) << "of 180";
}

// As large as a block of a real model: the minimum cuts. Sixteen tensors in a row, each read once and made of the last.
TEST(ActivationPlan, PricesLargeBlocks) {
  BlockKind kind{.forward_us = 100, .backward_us = 200};
  kind.activations.push_back({.bytes = 8, .dies = 24, .reads = {24}});
  for (int i = 0; i < 24; ++i) {  // every third costs much to make again
    kind.activations.push_back({.bytes = 10,
                                .op = i,
                                .dies = i + 2,
                                .recompute_us = i % 3 == 0 ? 50.0 : 1.0,
                                .can_recompute = true,
                                .inputs = {i},
                                .reads = {23 - i}});
    kind.forward_bytes.push_back(20);
  }
  kind.backward_at.assign(25, 0);
  kind.backward_greatest.assign(25, 0);
  const BlockMenu menu = block_menu(kind, false);
  EXPECT_FALSE(menu.is_exact);
  const auto cheap = std::find_if(menu.options.begin(), menu.options.end(),
                                  [](const BlockOption& one) { return one.recompute_us == 16; });
  ASSERT_NE(cheap, menu.options.end()) << "the cheap two thirds are made again, the rest is kept";
  EXPECT_EQ(cheap->held_bytes, 88);
  ActivationRequest request{.kinds = {kind}, .chain = std::vector<ChainBlock>(32), .budget_bytes = 3000};
  const ActivationPlan plan = plan_activations(request);
  EXPECT_TRUE(plan.fits);
  EXPECT_LE(plan.recompute_us, 32 * 16);
}

}  // namespace
}  // namespace kernel_pytorch::plan
