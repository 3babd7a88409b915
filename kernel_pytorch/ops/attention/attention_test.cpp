// What the shape list cannot say of attention: that options which mean the same give the same, rows with nothing to
// see, what dropout keeps, and bad arguments.
#include "kernel_pytorch/ops/attention/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bound_test.h"

namespace kernel_pytorch::attention {
namespace {

std::vector<double> run(const ForwardProblem& problem) {
  OwnContext context;
  check_and_run(problem, context);
  std::vector<double> results = values_of(problem.output);
  const std::vector<double> lses = values_of(problem.lse);
  results.insert(results.end(), lses.begin(), lses.end());
  return results;
}

void expect_same(const std::vector<double>& one, const std::vector<double>& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i] == other[i]) continue;  // infinities
    ASSERT_NEAR(one[i], other[i], 1e-5) << i;
  }
}

// Fills a mask [batch, heads, queries, keys] from a rule.
void set_mask(const TensorView& mask, const std::function<bool(int64_t, int64_t, int64_t, int64_t)>& keeps) {
  for (int64_t b = 0; b < mask.sizes[0]; ++b) {
    for (int64_t h = 0; h < mask.sizes[1]; ++h) {
      for (int64_t q = 0; q < mask.sizes[2]; ++q) {
        for (int64_t k = 0; k < mask.sizes[3]; ++k) {
          mask.as<bool>()[b * mask.strides[0] + h * mask.strides[1] + q * mask.strides[2] + k] = keeps(b, h, q, k);
        }
      }
    }
  }
}

using Rule = std::function<bool(int64_t batch, int64_t head, int64_t query, int64_t key)>;

TEST(Attention, OptionsThatMeanTheSameGiveTheSame) {
  Bound<ForwardProblem> masked = make({2, 2, 21, 30, 16}, DType::kFloat32, {{"mask", "full"}});
  const auto expect_mask = [&](const Rule& keeps, const std::function<void(Scoring&)>& change) {
    set_mask(masked.problem.scoring.mask, keeps);
    const std::vector<double> expected = run(masked.problem);
    ForwardProblem other = masked.problem;
    other.scoring.mask = {};
    change(other.scoring);
    expect_same(run(other), expected);
  };
  expect_mask([](int64_t, int64_t, int64_t q, int64_t k) { return k <= q + 9; }, [](Scoring& s) { s.causal = true; });
  expect_mask([](int64_t, int64_t, int64_t q, int64_t k) { return k <= q - 4; },
              [](Scoring& s) { s.causal = true, s.causal_offset = -4; });
  expect_mask([](int64_t, int64_t, int64_t q, int64_t k) { return k - (q + 9) >= -6 && k - (q + 9) <= 2; },
              [](Scoring& s) { s.window_left = 6, s.window_right = 2; });
  int32_t lengths[] = {12, -3};
  const TensorView lengths_view = contiguous_view(lengths, DType::kInt32, {2});
  expect_mask([](int64_t b, int64_t, int64_t, int64_t k) { return b == 0 && k < 12; },
              [&](Scoring& s) { s.key_lengths = lengths_view; });
  // 12 of 30 keys are real, fewer than the 21 queries: padding on the right, so query 0 stands at key 0.
  expect_mask([](int64_t b, int64_t, int64_t q, int64_t k) { return b == 0 && k <= q && k < 12; },
              [&](Scoring& s) { s.key_lengths = lengths_view, s.causal = true; });
  lengths[0] = 25, lengths[1] = 40;  // a cache longer than what it holds: the last query stands at the last real key
  expect_mask([](int64_t b, int64_t, int64_t q, int64_t k) { return k <= q + (b == 0 ? 25 : 30) - 21; },
              [&](Scoring& s) { s.key_lengths = lengths_view, s.causal = true; });
  expect_mask(
      [](int64_t b, int64_t, int64_t q, int64_t k) {
        const int64_t distance = k - (q + (b == 0 ? 25 : 30) - 21);
        return distance >= -6 && distance <= 2 && k < (b == 0 ? 25 : 30);
      },
      [&](Scoring& s) { s.key_lengths = lengths_view, s.window_left = 6, s.window_right = 2; });
  std::vector<int32_t> of_queries(42), of_keys(60);
  for (int i = 0; i < 42; ++i) of_queries[i] = i % 5 - 1;
  for (int i = 0; i < 60; ++i) of_keys[i] = i / 7 % 4 - 1;
  expect_mask([&](int64_t b, int64_t, int64_t q,
                  int64_t k) { return of_queries[b * 21 + q] != -1 && of_queries[b * 21 + q] == of_keys[b * 30 + k]; },
              [&](Scoring& s) {
                s.query_segment_ids = contiguous_view(of_queries.data(), DType::kInt32, {2, 21});
                s.key_segment_ids = contiguous_view(of_keys.data(), DType::kInt32, {2, 30});
              });
  // Tiles of 8 x 10: those whose row and column add up to an even number.
  int32_t key_counts[] = {2, 1, 2}, key_blocks[] = {2, 0, 0, 1, 0, 0, 0, 2, 0};
  const TensorView counts = contiguous_view(key_counts, DType::kInt32, {1, 1, 3});
  const TensorView blocks = contiguous_view(key_blocks, DType::kInt32, {1, 1, 3, 3});
  expect_mask([](int64_t, int64_t, int64_t q, int64_t k) { return (q / 8 + k / 10) % 2 == 0 && k <= q + 9; },
              [&](Scoring& s) {
                s.block_list = {.query_block = 8, .key_block = 10, .key_counts = counts, .key_blocks = blocks};
                s.block_list.query_counts = counts, s.block_list.query_blocks = blocks;
                s.causal = true;
              });
}

TEST(Attention, ALiBiIsABiasAndABiasOfMinusInfinityAMask) {
  Bound<ForwardProblem> biased = make({1, 3, 17, 23, 8}, DType::kFloat32, {{"bias", "full"}, {"alibi", "1"}});
  ForwardProblem sloped = biased.problem;
  sloped.scoring.bias = {};
  biased.problem.scoring.alibi_slopes = {};
  const TensorView& bias = biased.problem.scoring.bias;
  for (int64_t i = 0; i < bias.element_count(); ++i) {
    const int64_t head = i / (17 * 23), query = i / 23 % 17, key = i % 23;
    bias.as<float>()[i] = -sloped.scoring.alibi_slopes.as<float>()[head] * std::fabs(float(key - query - 6));
  }
  expect_same(run(sloped), run(biased.problem));
  Bound<ForwardProblem> masked = make({1, 3, 17, 23, 8}, DType::kFloat32, {{"mask", "full"}});
  set_mask(masked.problem.scoring.mask, [](int64_t, int64_t h, int64_t q, int64_t k) { return (q + k + h) % 3 && q; });
  for (int64_t i = 0; i < bias.element_count(); ++i) {
    bias.as<float>()[i] = masked.problem.scoring.mask.as<bool>()[i] ? 0 : -HUGE_VALF;
  }
  masked.problem.query = biased.problem.query;
  masked.problem.key = biased.problem.key;
  masked.problem.value = biased.problem.value;
  expect_same(run(biased.problem), run(masked.problem));
  biased.problem.scoring.softcap = 1e6;  // so large that it changes nothing, but must keep the infinity
  biased.problem.scoring.softcap_after_bias = true;
  expect_same(run(biased.problem), run(masked.problem));
}

TEST(Attention, PackedSequencesAreThatManyCalls) {
  Bound<ForwardProblem> bound = make({1, 4, 20, 33, 8}, DType::kFloat32,
                                     {{"sequences", "4"}, {"layout", "bshd"}, {"key_heads", "2"}, {"causal", "1"}});
  ForwardProblem& packed = bound.problem;
  int32_t of_queries[] = {0, 7, 7, 18, 18}, of_keys[] = {0, 9, 14, 20, 20};
  packed.scoring.cu_seqlens_q.data = of_queries;
  packed.scoring.cu_seqlens_k.data = of_keys;
  packed.scoring.max_seqlen_q = 11;
  packed.scoring.max_seqlen_k = 9;
  run(packed);
  const auto part = [](const TensorView& view, int64_t first, int64_t end) {
    TensorView part = view;
    part.data = view.as<float>() + first * view.strides[2];
    part.sizes[2] = end - first;
    return part;
  };
  for (int i = 0; i < 4; ++i) {
    ForwardProblem alone{.query = part(packed.query, of_queries[i], of_queries[i + 1]),
                         .key = part(packed.key, of_keys[i], of_keys[i + 1]),
                         .value = part(packed.value, of_keys[i], of_keys[i + 1])};
    alone.scoring.scale = packed.scoring.scale;
    alone.scoring.causal = true;
    Bound<ForwardProblem> results;
    alone.output = results.own(part(packed.output, of_queries[i], of_queries[i + 1]));
    alone.lse = results.own(contiguous_view(nullptr, DType::kFloat32, {1, 4, of_queries[i + 1] - of_queries[i]}));
    std::vector<double> expected = run(alone);
    expected.resize(static_cast<size_t>(alone.output.element_count()));
    expect_same(values_of(part(packed.output, of_queries[i], of_queries[i + 1])), expected);
  }
  for (double value : values_of(part(packed.output, 18, 20))) EXPECT_EQ(value, 0);
  for (int head = 0; head < 4; ++head) {
    EXPECT_EQ(packed.lse.as<float>()[head * 20 + 18], -HUGE_VALF);
    EXPECT_EQ(packed.lse.as<float>()[head * 20 + 19], -HUGE_VALF);
  }
}

TEST(Attention, GroupsOfHeadsReadTheSameKeys) {
  Bound<ForwardProblem> grouped = make({2, 6, 9, 12, 8}, DType::kFloat32, {{"key_heads", "2"}});
  Bound<ForwardProblem> repeated = make({2, 6, 9, 12, 8}, DType::kFloat32, {});
  repeated.problem.query = grouped.problem.query;
  for (const auto& [to, from] :
       {std::pair{&repeated.problem.key, &grouped.problem.key}, {&repeated.problem.value, &grouped.problem.value}}) {
    for (int64_t i = 0; i < to->element_count(); ++i) {
      const int64_t batch = i / (6 * 96), head = i / 96 % 6, rest = i % 96;
      to->as<float>()[i] = from->as<float>()[(batch * 2 + head / 3) * 96 + rest];
    }
  }
  expect_same(run(grouped.problem), run(repeated.problem));
}

TEST(Attention, RowsWithNothingToSeeAreZeroAndTheirLseIsTheSink) {
  Bound<ForwardProblem> bound = make({1, 2, 8, 3, 8}, DType::kFloat32, {{"causal", "1"}, {"sinks", "1"}});
  ForwardProblem problem = bound.problem;
  run(problem);
  for (int head = 0; head < 2; ++head) {
    for (int query = 0; query < 5; ++query) {
      EXPECT_FLOAT_EQ(problem.lse.as<float>()[head * 8 + query], problem.scoring.sinks.as<float>()[head]);
      for (int i = 0; i < 8; ++i) EXPECT_EQ(problem.output.as<float>()[(head * 8 + query) * 8 + i], 0);
    }
    EXPECT_GT(problem.lse.as<float>()[head * 8 + 5], problem.scoring.sinks.as<float>()[head]);
  }
  problem.scoring.sinks = {};
  run(problem);
  EXPECT_EQ(problem.lse.as<float>()[0], -HUGE_VALF);
  EXPECT_EQ(problem.output.as<float>()[0], 0);
}

TEST(Attention, DropoutKeepsItsShareAndDependsOnSeedAndOffset) {
  Bound<ForwardProblem> bound = make({1, 2, 64, 512, 8}, DType::kFloat32, {{"dropout", "0.25"}, {"scale", "0"}});
  ForwardProblem& problem = bound.problem;
  for (int64_t i = 0; i < problem.value.element_count(); ++i) problem.value.as<float>()[i] = 1;
  const std::vector<double> outputs = run(problem);
  double mean = 0;
  for (int64_t i = 0; i < problem.output.element_count(); ++i) mean += outputs[i];
  EXPECT_NEAR(mean / static_cast<double>(problem.output.element_count()), 1, 0.01);
  problem.scoring.seed.as<int64_t>()[1] += 1;
  EXPECT_NE(run(problem), outputs);
  problem.scoring.seed.as<int64_t>()[1] -= 1;
  EXPECT_EQ(run(problem), outputs);
  problem.scoring.dropout_p = 1;
  for (int64_t i = 0; const double value : run(problem)) {
    EXPECT_TRUE(value == 0 || i >= problem.output.element_count()) << value;
    ++i;
  }
}

TEST(Attention, ErrorsNameBothValuesAndTheCure) {
  Bound<ForwardProblem> bound =
      make({2, 4, 6, 8, 16}, DType::kFloat32,
           {{"key_heads", "2"}, {"bias", "full"}, {"sinks", "1"}, {"lengths", "1"}, {"blocks", "4"}});
  OwnContext context;
  const auto expect_error = [&](const std::function<void(ForwardProblem&)>& change, const std::string& words) {
    ForwardProblem problem = bound.problem;
    change(problem);
    try {
      check_and_run(problem, context);
      ADD_FAILURE() << "no error; expected: " << words;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  check_and_run(bound.problem, context);
  expect_error([](ForwardProblem& p) { p.key = {}; }, "attention: key is missing");
  expect_error([](ForwardProblem& p) { p.query.rank = 3; }, "it must be [batch, heads, sequence, size]");
  expect_error([](ForwardProblem& p) { p.value.dtype = DType::kBFloat16; },
               "value is bf16, query is fp32; it must be fp32");
  expect_error([](ForwardProblem& p) { p.key.sizes[3] = 8; }, "key has shape [2, 2, 8, 8]; it must be [2, 2, 8, 16]");
  expect_error([](ForwardProblem& p) { p.value.sizes[2] = 5; },
               "value has shape [2, 2, 5, 16]; it must be [2, 2, 8, 16]");
  expect_error([](ForwardProblem& p) { p.key.sizes[1] = p.value.sizes[1] = 3; }, "query has 4 heads, key has 3");
  expect_error([](ForwardProblem& p) { p.query.strides[3] = 2; }, "query has stride 2 in its last dimension");
  expect_error([](ForwardProblem& p) { p.scoring.scale = HUGE_VAL; }, "scale is inf; it must be finite");
  expect_error([](ForwardProblem& p) { p.scoring.softcap = -1; }, "softcap is -1; it must be positive");
  expect_error([](ForwardProblem& p) { p.scoring.window_left = -2; }, "the window is (-2, -1)");
  expect_error([](ForwardProblem& p) { p.scoring.bias.sizes[3] = 7; },
               "bias has shape [2, 4, 6, 7]; it must be [2, 4, 6, 8]");
  expect_error([](ForwardProblem& p) { p.scoring.bias.dtype = DType::kFloat16; }, "bias is fp16, query is fp32");
  expect_error([](ForwardProblem& p) { p.scoring.mask = p.scoring.bias; }, "mask is fp32; it must be bool");
  expect_error([](ForwardProblem& p) { p.scoring.sinks.sizes[0] = 3; }, "sinks has shape [3]; it must be [4], heads");
  expect_error([](ForwardProblem& p) { p.scoring.key_lengths.dtype = DType::kInt64; }, "it must be int32");
  expect_error([](ForwardProblem& p) { p.scoring.key_segment_ids = p.scoring.key_lengths; }, "give both");
  expect_error([](ForwardProblem& p) { p.scoring.cu_seqlens_k = p.scoring.key_lengths; }, "they go together");
  expect_error([](ForwardProblem& p) { p.scoring.cu_seqlens_q = p.scoring.cu_seqlens_k = p.scoring.key_lengths; },
               "the batch is 2; packed sequences have a batch of 1");
  expect_error([](ForwardProblem& p) { p.scoring.dropout_p = 1.5; }, "dropout_p is 1.5; it must lie in [0, 1]");
  expect_error([](ForwardProblem& p) { p.scoring.dropout_p = 0.5; }, "seed is missing");
  expect_error([](ForwardProblem& p) { p.scoring.block_list.key_block = 0; }, "blocks are 4 by 0");
  expect_error([](ForwardProblem& p) { p.scoring.block_list.key_block = 2; },
               "counts of query blocks have shape [1, 4, 2]");
  expect_error([](ForwardProblem& p) { p.scoring.block_list.key_counts = {}; }, "the list of key blocks is missing");
  expect_error([](ForwardProblem& p) { p.scoring.block_list.query_counts = {}; },
               "of query blocks one of counts and indices");
  expect_error([](ForwardProblem& p) { p.output.sizes[3] = 8; },
               "output has shape [2, 4, 6, 8]; it must be [2, 4, 6, 16]");
  expect_error([](ForwardProblem& p) { p.lse.strides[1] = 12; }, "make it contiguous");
  expect_error([](ForwardProblem& p) { p.scoring.score_mod = "expression 1\n%0 = key\nreturn %0\n"; },
               "attention: score_mod gives a int; it must give one float");
  expect_error([](ForwardProblem& p) { p.scoring.mask_mod = "expression 1\n%0 = score\nreturn %0\n"; },
               "attention: mask_mod gives a float; it must give one bool");
  expect_error([](ForwardProblem& p) { p.scoring.score_mod = "nonsense"; }, "line 1");
  expect_error([](ForwardProblem& p) { p.query.device = {DeviceKind::kCuda, 0}; }, "move all tensors to one device");
}

}  // namespace
}  // namespace kernel_pytorch::attention
