// What attention's arguments mean, whoever calls: default scale, layouts, packed sequences, broadcasting, block lists.
#include "kernel_pytorch/ops/attention/problem.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/check.h"

namespace kernel_pytorch::attention {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kQueries = 5, kKeys = 7, kSize = 16, kValueSize = 8;

// A transposed copy of the view's shape without memory: dimensions 1 and 2 change places, in shape alone.
TensorView swapped(TensorView view) {
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

// Arguments with memory of their own, heads before the sequence.
struct Case {
  Bound<ForwardProblem> memory;
  Forward arguments;
  OwnContext context;

  TensorView filled(std::initializer_list<int64_t> sizes) {
    const TensorView view = memory.own(contiguous_view(nullptr, DType::kFloat32, sizes));
    for (int64_t i = 0; i < view.element_count(); ++i) {
      view.as<float>()[i] = static_cast<float>(std::sin(1.7 * static_cast<double>(i + 3 * view.element_count())));
    }
    return view;
  }
  Case() {
    arguments.query = filled({kBatch, kHeads, kQueries, kSize});
    arguments.key = filled({kBatch, kKeyHeads, kKeys, kSize});
    arguments.value = filled({kBatch, kKeyHeads, kKeys, kValueSize});
    arguments.output = filled({kBatch, kHeads, kQueries, kValueSize});
    arguments.lse = filled({kBatch, kHeads, kQueries});
  }
  std::vector<double> run() {
    forward(arguments, context);
    return values_of(arguments.output);
  }
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << i;
}

void expect_error(const Forward& arguments, const std::string& part) {
  OwnContext context;
  try {
    forward(arguments, context);
    ADD_FAILURE() << "no error: " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(AttentionMeaning, ScaleIsOneOverTheRootOfTheSize) {
  Case none, given, one;
  given.arguments.options.scale = 1 / std::sqrt(static_cast<double>(kSize));
  one.arguments.options.scale = 1;
  EXPECT_EQ(none.run(), given.run());
  EXPECT_NE(none.run(), one.run());
}

TEST(AttentionMeaning, SequenceFirstIsTheSameWithOtherStrides) {
  Case heads_first, sequence_first;
  Forward& arguments = sequence_first.arguments;
  arguments.options.heads_first = false;
  for (TensorView* view : {&arguments.query, &arguments.key, &arguments.value, &arguments.output}) {
    *view = swapped(*view);
  }
  const std::vector<double> expected = heads_first.run();
  sequence_first.run();
  EXPECT_EQ(values_of(swapped(arguments.output)), expected);
  EXPECT_EQ(values_of(arguments.lse), values_of(heads_first.arguments.lse));
  arguments.options.heads_first = true;
  expect_error(arguments, "query has 5 heads, key has 7");
  arguments.query.rank = 3;
  expect_error(arguments, "attention: query has shape [2, 5, 4]; layout \"bhsd\" is [batch, heads, sequence, size]");
}

TEST(AttentionMeaning, PackedSequencesAreTokensHeadsAndSize) {
  Case batched, packed;
  const std::vector<double> expected = batched.run();
  // [batch * sequence, heads, size] and [heads, batch * sequence], with memory of their own.
  const auto pack = [&](const TensorView& view) {
    const TensorView made = packed.filled({view.sizes[0] * view.sizes[2], view.sizes[1], view.sizes[3]});
    const std::vector<double> values = values_of(view);
    size_t next = 0;
    for (int64_t batch = 0; batch < view.sizes[0]; ++batch) {
      for (int64_t head = 0; head < view.sizes[1]; ++head) {
        for (int64_t i = 0; i < view.sizes[2] * view.sizes[3]; ++i) {
          const int64_t token = batch * view.sizes[2] + i / view.sizes[3];
          made.as<float>()[(token * view.sizes[1] + head) * view.sizes[3] + i % view.sizes[3]] =
              static_cast<float>(values[next++]);
        }
      }
    }
    return made;
  };
  Forward& arguments = packed.arguments;
  for (TensorView* view : {&arguments.query, &arguments.key, &arguments.value}) *view = pack(*view);
  arguments.output = packed.filled({kBatch * kQueries, kHeads, kValueSize});
  arguments.lse = packed.filled({kHeads, kBatch * kQueries});
  int32_t of_queries[] = {0, kQueries, 2 * kQueries}, of_keys[] = {0, kKeys, 2 * kKeys};
  arguments.options.cu_seqlens_q = contiguous_view(of_queries, DType::kInt32, {3});
  arguments.options.cu_seqlens_k = contiguous_view(of_keys, DType::kInt32, {3});
  for (int64_t longest : {int64_t{0}, kKeys}) {  // 0: all tokens
    arguments.options.max_seqlen_q = arguments.options.max_seqlen_k = longest;
    forward(arguments, packed.context);
    expect_near(values_of(arguments.output), values_of(pack(batched.arguments.output)));
    for (int64_t batch = 0; batch < kBatch; ++batch) {
      for (int64_t head = 0; head < kHeads; ++head) {
        for (int64_t query = 0; query < kQueries; ++query) {
          const float found = arguments.lse.as<float>()[(head * kBatch + batch) * kQueries + query];
          EXPECT_NEAR(found, batched.arguments.lse.as<float>()[(batch * kHeads + head) * kQueries + query], 1e-5);
        }
      }
    }
  }
  EXPECT_EQ(problem_of(arguments).scoring.max_seqlen_q, kKeys);
  arguments.options.max_seqlen_k = -1;
  expect_error(arguments, "max_seqlen_k is -1; give the length of the longest sequence, or none");
  arguments.options.max_seqlen_k = 0;
  arguments.lse.rank = 1;
  expect_error(arguments, "attention: lse has shape [4]; it must be [heads, tokens]");
  arguments.query.rank = 2;
  expect_error(arguments, "packed sequences (cu_seqlens) are [tokens, heads, size]");
}

TEST(AttentionMeaning, WhatBroadcastsHasStridesOfZero) {
  Case one;
  Options& options = one.arguments.options;
  options.bias = one.filled({kHeads, 1, kKeys});
  options.alibi_slopes = one.filled({kHeads});
  std::vector<int32_t> ids(kKeys, 3);
  options.query_segment_ids = contiguous_view(ids.data(), DType::kInt32, {kQueries});
  options.key_segment_ids = contiguous_view(ids.data(), DType::kInt32, {kBatch, kKeys});
  options.key_segment_ids.strides[0] = 0;
  const Scoring scoring = problem_of(one.arguments).scoring;
  EXPECT_EQ(shape_text(scoring.bias.shape()), "[2, 4, 5, 7]");
  EXPECT_EQ(std::vector(scoring.bias.strides.begin(), scoring.bias.strides.begin() + 4),
            (std::vector<int64_t>{0, kKeys, 0, 1}));
  EXPECT_EQ(shape_text(scoring.alibi_slopes.shape()), "[2, 4]");
  EXPECT_EQ(scoring.alibi_slopes.strides[0], 0);
  EXPECT_EQ(shape_text(scoring.query_segment_ids.shape()), "[2, 5]");
  EXPECT_EQ(scoring.query_segment_ids.strides[0], 0);

  Case other;
  other.arguments.options = options;
  const TensorView whole =
      other.memory.own(contiguous_view(nullptr, DType::kFloat32, {kBatch, kHeads, kQueries, kKeys}));
  store_values(whole, values_of(scoring.bias));
  other.arguments.options.bias = whole;
  EXPECT_EQ(one.run(), other.run());
  options.bias.sizes[2] = 6;
  expect_error(one.arguments, "bias has shape [2, 4, 5, 6]; it must be [2, 4, 5, 7]");
  options.bias.rank = 5;
  expect_error(one.arguments, "it must broadcast to [2, 4, 5, 7]");
  options.bias = {};
  options.alibi_slopes.rank = 3;
  expect_error(one.arguments, "it must be [heads] or [batch, heads]");
}

TEST(AttentionMeaning, BlockListsAreTwoFourOrEightTensors) {
  Case all, listed;
  all.context->kernel_override = "cpu_tiles";  // which takes lists; few queries alone have another
  int32_t counts[] = {1}, blocks[] = {0};
  Options& options = listed.arguments.options;
  options.blocks = {contiguous_view(counts, DType::kInt32, {1, 1, 1}),
                    contiguous_view(blocks, DType::kInt32, {1, 1, 1, 1})};
  options.query_block = options.key_block = 128;
  EXPECT_EQ(listed.run(), all.run());
  counts[0] = 0;
  for (double value : listed.run()) EXPECT_EQ(value, 0);
  const Scoring scoring = problem_of(listed.arguments).scoring;
  EXPECT_EQ(scoring.block_list.key_counts.data, counts);
  EXPECT_TRUE(scoring.blocks.empty());
  options.blocks.pop_back();
  expect_error(listed.arguments, "attention: a block list of 1 tensors");
}

TEST(AttentionMeaning, GradientsHaveTheCallersShapes) {
  Case one;
  one.arguments.options.bias = one.filled({kHeads, 1, kKeys});
  one.arguments.options.score_mod =
      "expression 1\ncapture fp32 1\ncapture fp32 1\n%0 = score\n%1 = head\n%2 = load 0 %1\n%3 = batch\n"
      "%4 = load 1 %3\n%5 = mul %0 %4\n%6 = mul %5 %2\nreturn %6\n";
  one.arguments.options.captured = {one.filled({kHeads}), one.filled({kBatch})};
  one.run();
  const Forward& forward = one.arguments;
  Backward arguments{.grad_output = one.filled({kBatch, kHeads, kQueries, kValueSize}),
                     .query = forward.query,
                     .key = forward.key,
                     .value = forward.value,
                     .output = forward.output,
                     .lse = forward.lse,
                     .wants_captured = 2,
                     .options = forward.options};
  arguments.grad_query = one.filled({kBatch, kHeads, kQueries, kSize});
  arguments.grad_key = one.filled({kBatch, kKeyHeads, kKeys, kSize});
  arguments.grad_value = one.filled({kBatch, kKeyHeads, kKeys, kValueSize});
  arguments.grad_bias = one.filled({kHeads, 1, kKeys});
  arguments.grad_captured = one.filled({kBatch});
  backward(arguments, one.context);
  const std::vector<double> of_second = values_of(arguments.grad_captured), of_bias = values_of(arguments.grad_bias);
  EXPECT_NE(of_second[0], 0);
  EXPECT_NE(of_bias[0], 0);
  arguments.wants_captured = 3;  // one row: the first tensor's, then the second's
  arguments.grad_captured = one.filled({kHeads + kBatch});
  backward(arguments, one.context);
  const std::vector<double> of_both = values_of(arguments.grad_captured);
  expect_near({of_both.begin() + kHeads, of_both.end()}, of_second);
  // The same gradients of a bias that is not broadcast, summed over what was.
  const TensorView bias = one.memory.own(contiguous_view(nullptr, DType::kFloat32, {kBatch, kHeads, kQueries, kKeys}));
  store_values(bias, values_of(problem_of(arguments).scoring.bias));
  arguments.options.bias = bias;
  arguments.grad_bias = one.filled({kBatch, kHeads, kQueries, kKeys});
  backward(arguments, one.context);
  std::vector<double> summed(kHeads * kKeys);
  for (int64_t i = 0; const double value : values_of(arguments.grad_bias)) {
    summed[static_cast<size_t>(i / (kQueries * kKeys) % kHeads * kKeys + i % kKeys)] += value;
    ++i;
  }
  expect_near(of_bias, summed);

  const auto expect_refused = [&](const std::string& part) {
    try {
      backward(arguments, one.context);
      ADD_FAILURE() << "no error: " << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  arguments.wants_captured = 1;
  expect_refused("grad_captured has shape [6]; it must be a row of 4 elements");
  arguments.wants_captured = 4;
  expect_refused("wants_captured is 4, there are 2 captured tensors");
  arguments.wants_captured = 3;
  arguments.grad_bias.sizes[0] = 1;
  expect_refused("grad_bias has shape [1, 4, 5, 7], bias has [2, 4, 5, 7]");
  arguments.grad_bias.sizes[0] = kBatch;
  arguments.writes_keys = true;
  expect_refused("writes_keys is for backward_part");
}

}  // namespace
}  // namespace kernel_pytorch::attention
