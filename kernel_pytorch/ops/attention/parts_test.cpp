// That any split over keys, and over queries, gives what one call gives: forward added up part by part, backward from
// the whole's output and lse, with every option that a part can have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/shapes.h"

namespace kernel_pytorch::attention {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TensorView narrow(TensorView view, int dimension, int64_t first, int64_t count) {
  if (!view.is_present()) return view;
  view.data = view.as<char>() + first * view.strides[dimension] * size_of(view.dtype);
  view.sizes[dimension] = count;
  return view;
}

struct Range {
  int64_t first = 0, count = 0;
};

// Ranges that cover `length` in random order, some of them empty.
std::vector<Range> random_split(int64_t length, int parts, std::mt19937& random) {
  std::vector<int64_t> ends{0, length};
  for (int i = 1; i < parts; ++i) ends.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(length + 1)));
  if (parts > 2) ends.push_back(ends.back());
  std::ranges::sort(ends);
  std::vector<Range> ranges;
  for (size_t i = 1; i < ends.size(); ++i) ranges.push_back({ends[i - 1], ends[i] - ends[i - 1]});
  std::ranges::shuffle(ranges, random);
  return ranges;
}

// The whole's scoring as one part sees it; `lengths` receives the part's own key lengths.
Scoring part_of(const Scoring& whole, Range queries, Range keys, int64_t offset, bool is_first,
                std::vector<int32_t>& lengths) {
  Scoring part = whole;
  part.first_query = queries.first;
  part.first_key = keys.first;
  part.causal_offset = offset;
  for (TensorView* view : {&part.bias, &part.mask}) {
    *view = narrow(narrow(*view, 2, queries.first, queries.count), 3, keys.first, keys.count);
  }
  part.query_segment_ids = narrow(part.query_segment_ids, 1, queries.first, queries.count);
  part.key_segment_ids = narrow(part.key_segment_ids, 1, keys.first, keys.count);
  if (part.key_lengths.is_present()) {
    lengths.clear();
    for (int64_t i = 0; i < part.key_lengths.sizes[0]; ++i) {
      lengths.push_back(part.key_lengths.as<const int32_t>()[i] - static_cast<int32_t>(keys.first));
    }
    part.key_lengths.data = lengths.data();
  }
  if (!is_first) part.sinks = {};
  return part;
}

int64_t offset_of(const ForwardProblem& whole) {
  return whole.scoring.causal_offset.value_or(whole.key.sizes[2] - whole.query.sizes[2]);
}

// The statistics of a part of the queries, which the ops want contiguous.
struct OwnStatistics : Bound<ForwardProblem> {
  TensorView copy(const TensorView& whole, Range queries) {
    const TensorView from = narrow(whole, 2, queries.first, queries.count);
    const TensorView made = own(contiguous_view(nullptr, whole.dtype, from.shape()));
    store_values(made, values_of(from));
    return made;
  }
};
void copy_back(const TensorView& part, const TensorView& whole, Range queries) {
  const std::vector<double> values = values_of(part);
  const TensorView to = narrow(whole, 2, queries.first, queries.count);
  size_t i = 0;
  for (int64_t b = 0; b < to.sizes[0]; ++b) {
    for (int64_t h = 0; h < to.sizes[1]; ++h) {
      for (int64_t q = 0; q < to.sizes[2]; ++q) {
        store_element(to.data, to.dtype, b * to.strides[0] + h * to.strides[1] + q, values[i++]);
      }
    }
  }
}

void forward_by_parts(const ForwardProblem& whole, const TensorView& output, const TensorView& lse,
                      std::mt19937& random, Context& context) {
  std::vector<int32_t> lengths;
  for (const Range& queries : random_split(whole.query.sizes[2], 1 + static_cast<int>(random() % 3), random)) {
    bool is_first = true;
    for (const Range& keys : random_split(whole.key.sizes[2], 1 + static_cast<int>(random() % 5), random)) {
      OwnStatistics statistics;
      ForwardProblem part = whole;
      part.accumulate = true;
      part.query = narrow(whole.query, 2, queries.first, queries.count);
      part.key = narrow(whole.key, 2, keys.first, keys.count);
      part.value = narrow(whole.value, 2, keys.first, keys.count);
      part.output = narrow(output, 2, queries.first, queries.count);
      part.lse = statistics.copy(lse, queries);
      part.scoring = part_of(whole.scoring, queries, keys, offset_of(whole), is_first, lengths);
      check_and_run(part, context);
      copy_back(part.lse, lse, queries);
      is_first = false;
    }
  }
}

void backward_by_parts(const BackwardProblem& whole, int64_t offset, std::mt19937& random, Context& context) {
  std::vector<int32_t> lengths;
  bool is_first = true;  // part of the queries, for all keys
  for (const Range& queries : random_split(whole.query.sizes[2], 1 + static_cast<int>(random() % 3), random)) {
    for (const Range& keys : random_split(whole.key.sizes[2], 1 + static_cast<int>(random() % 5), random)) {
      OwnStatistics statistics;
      BackwardProblem part = whole;
      part.accumulate = true;
      part.writes_keys = is_first;
      for (TensorView* view : {&part.query, &part.output, &part.grad_output, &part.grad_query}) {
        *view = narrow(*view, 2, queries.first, queries.count);
      }
      for (TensorView* view : {&part.key, &part.value, &part.grad_key, &part.grad_value}) {
        *view = narrow(*view, 2, keys.first, keys.count);
      }
      part.lse = statistics.copy(whole.lse, queries);
      part.grad_lse = statistics.copy(whole.grad_lse, queries);
      part.grad_bias = part.grad_sinks = {};
      part.grad_captured.clear();
      part.scoring = part_of(whole.scoring, queries, keys, offset, false, lengths);
      check_and_run(part, context);
    }
    is_first = false;
  }
}

void expect_near(const TensorView& actual, const TensorView& expected, double tolerance, const char* name) {
  const std::vector<double> one = values_of(actual), other = values_of(expected);
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i] == other[i]) continue;  // infinities
    ASSERT_NEAR(one[i], other[i], tolerance * std::max(1.0, std::abs(other[i]))) << name << "[" << i << "]";
  }
}

struct Kernels {
  std::string_view name;  // empty: the best for this machine
  double tolerance;
};
// AMX rounds probabilities to bf16, relative to the largest so far, which other parts have otherwise: a result is a
// mean of values, up to 4, whose weights are off by 2^-9 on either side. The kernel of fp32 is held to its own
// precision there, too.
std::vector<Kernels> kernels_for(DType dtype) {
  if (dtype == DType::kFloat64) return {{"", 1e-12}};
  OwnContext context;
  if (dtype == DType::kBFloat16 && context->info->cpu.isa == CpuIsa::kX86V4Amx)
    return {{"", 0x1p-6}, {"cpu_tiles", 4e-6}};
  return {{"", 4e-6}};
}

void expect_parts_are_the_whole(std::vector<int64_t> shape, DType dtype, RequestOptions options, const Kernels& kernels,
                                std::mt19937& random) {
  options.push_back({"results", dtype == DType::kFloat64 ? "fp64" : "fp32"});
  options.push_back({"grad_lse", "1"});
  const double tolerance = kernels.tolerance;
  Bound<ForwardProblem> bound = make(shape, dtype, options);
  const ForwardProblem& whole = bound.problem;
  OwnContext context;
  context->kernel_override = kernels.name;
  check_and_run(whole, context);
  const TensorView output = bound.own(whole.output), lse = bound.own(whole.lse);
  store_values(output, std::vector<double>(span_elements(output), kNaN));  // not to be read
  store_values(lse, std::vector<double>(span_elements(lse), -HUGE_VAL));
  forward_by_parts(whole, output, lse, random, context);
  expect_near(output, whole.output, tolerance, "output");
  expect_near(lse, whole.lse, tolerance, "lse");

  Bound<BackwardProblem> gradients =
      bind(kBackward,
           make_backward({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)}));
  BackwardProblem& all = gradients.problem;
  all.scoring = whole.scoring;
  all.query = whole.query, all.key = whole.key, all.value = whole.value;
  store_values(all.lse, values_of(whole.lse));
  check_and_run(all, context);
  BackwardProblem parts = all;
  for (TensorView* view : {&parts.grad_query, &parts.grad_key, &parts.grad_value}) *view = gradients.own(*view);
  for (const TensorView& view : {parts.grad_key, parts.grad_value}) {
    store_values(view, std::vector<double>(span_elements(view), kNaN));  // not to be read
  }
  backward_by_parts(parts, offset_of(whole), random, context);
  expect_near(parts.grad_query, all.grad_query, 4 * tolerance, "grad_query");
  expect_near(parts.grad_key, all.grad_key, 4 * tolerance, "grad_key");
  expect_near(parts.grad_value, all.grad_value, 4 * tolerance, "grad_value");
}

TEST(AttentionParts, AnySplitIsOneCall) {
  std::mt19937 random(17);
  for (const registry::ProblemRequest& request : shapes()) {
    const auto has = [&](std::string_view word) {
      return std::ranges::any_of(request.options, [&](const auto& option) { return option.first == word; });
    };
    // Lists of tiles and packs are cut by whoever cuts; lengths move the diagonal, which parts name.
    if (has("blocks") || has("sequences") || has("accumulate") || has("results") || has("first_query")) continue;
    if (has("lengths") && (has("causal") || has("window_left") || has("alibi"))) continue;
    if (request.dtype == DType::kFloat16) continue;
    std::vector<int64_t> shape = request.shape;
    if (request.dtype == DType::kFloat64 && shape.back() > 64) continue;  // the reference, which takes its time
    if (shape[shape.size() - 2] > unless_emulated(700, 100) || shape[2] < 2) continue;
    RequestOptions options = request.options;
    std::erase_if(options, [](const auto& option) { return option.first == "lse" || option.first == "grad_lse"; });
    std::string name{name_of(request.dtype)};
    for (const auto& [word, value] : options) name += " " + word + "=" + value;
    for (const Kernels& kernels : kernels_for(request.dtype)) {
      SCOPED_TRACE(name + " " + std::string(kernels.name));
      expect_parts_are_the_whole(shape, request.dtype, options, kernels, random);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AttentionParts, NothingAddedLeavesEveryBit) {
  Bound<ForwardProblem> bound =
      make({1, 2, 40, 30, 16}, DType::kFloat32,
           {{"accumulate", "1"}, {"causal", "1"}, {"causal_offset", "0"}, {"first_key", "50"}});
  const std::vector<double> output = values_of(bound.problem.output), lse = values_of(bound.problem.lse);
  OwnContext context;
  check_and_run(bound.problem, context);
  EXPECT_EQ(values_of(bound.problem.output), output);
  EXPECT_EQ(values_of(bound.problem.lse), lse);
}

TEST(AttentionParts, NotANumberSpreads) {
  Bound<ForwardProblem> bound = make({1, 1, 2, 3, 4}, DType::kFloat32, {{"accumulate", "1"}});
  bound.problem.key.as<float>()[0] = static_cast<float>(kNaN);
  OwnContext context;
  check_and_run(bound.problem, context);
  for (double value : values_of(bound.problem.output)) EXPECT_TRUE(std::isnan(value));
  for (double value : values_of(bound.problem.lse)) EXPECT_TRUE(std::isnan(value));
}

TEST(AttentionParts, BadPartsSayWhatIsWrong) {
  const auto expect_error = [](const ForwardProblem& problem, const std::string& text) {
    OwnContext context;
    try {
      check_and_run(problem, context);
      FAIL() << "no error; expected " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  Bound<ForwardProblem> bound = make({1, 1, 8, 8, 4}, DType::kBFloat16, {{"accumulate", "1"}});
  ForwardProblem problem = bound.problem;
  problem.lse = {};
  expect_error(problem, "lse is missing");
  problem = bound.problem;
  problem.output.dtype = DType::kBFloat16;
  expect_error(problem, "output is bf16");
  problem = bound.problem;
  problem.scoring.first_key = -1;
  expect_error(problem, "neither can be negative");
  problem.scoring.first_key = 8;
  problem.scoring.causal = true;
  expect_error(problem, "causal_offset is missing");
  Bound<ForwardProblem> packed = make({1, 1, 8, 8, 4}, DType::kFloat32, {{"sequences", "2"}});
  packed.problem.scoring.first_query = 8;
  expect_error(packed.problem, "give segment ids instead");
}

}  // namespace
}  // namespace kernel_pytorch::attention
