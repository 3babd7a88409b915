// Offsets, windows, parts and block sizes of up to 64 bits mean what they say: every kernel of the CPU against a mask
// that is computed in 128 bits.
#include <gtest/gtest.h>

#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/bounds.h"

namespace kernel_pytorch::attention {
namespace {

using Wide = __int128;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kQueries = 7, kKeys = 11;

// What a call keeps, by the contract.
bool keeps(const Scoring& scoring, int64_t query, int64_t key) {
  const Wide offset = Wide{scoring.causal_offset.value_or(kKeys - kQueries)} + scoring.first_query - scoring.first_key;
  const Wide distance = key - (query + offset);
  if (scoring.causal && distance > 0) return false;
  if (scoring.window_left >= 0 && distance < -Wide{scoring.window_left}) return false;
  return scoring.window_right < 0 || distance <= scoring.window_right;
}

void expect_contract(const Bound<ForwardProblem>& bound, const Scoring& numbers) {
  OwnContext context;
  ForwardProblem masked = bound.problem, counted = bound.problem;
  for (int64_t q = 0; q < kQueries; ++q) {
    for (int64_t k = 0; k < kKeys; ++k) masked.scoring.mask.as<bool>()[q * kKeys + k] = keeps(numbers, q, k);
  }
  check_and_run(masked, context);
  std::vector<double> expected = values_of(masked.output);
  const std::vector<double> of_lse = values_of(masked.lse);
  const TensorView mask = counted.scoring.mask;
  counted.scoring = numbers;
  counted.scoring.scale = masked.scoring.scale;
  check_and_run(counted, context);
  const auto text = [&](int64_t offset) {
    return concat("offset ", offset, " window ", numbers.window_left, " ", numbers.window_right, " causal ",
                  numbers.causal, " part ", numbers.first_query, " ", numbers.first_key);
  };
  const std::vector<double> actual = values_of(counted.output), actual_lse = values_of(counted.lse);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 1e-5) << text(numbers.causal_offset.value_or(-1));
  }
  for (size_t i = 0; i < of_lse.size(); ++i) {
    if (actual_lse[i] == of_lse[i]) continue;  // infinities
    ASSERT_NEAR(actual_lse[i], of_lse[i], 1e-5) << text(numbers.causal_offset.value_or(-1));
  }
}

TEST(AttentionBounds, NumbersOf64BitsMeanWhatTheySay) {
  const int64_t far = int64_t{1} << 62;
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const Bound<ForwardProblem> bound = make({1, 1, kQueries, kKeys, 8}, dtype, {{"mask", "full"}});
    for (int64_t offset : {kLeast, -far, -(int64_t{1} << 31), int64_t{-3}, int64_t{0}, int64_t{4}, int64_t{1} << 29,
                           int64_t{1} << 40, far, kMost}) {
      for (int64_t left : {int64_t{-1}, int64_t{2}, int64_t{1} << 31, far, kMost}) {
        for (int64_t right : {int64_t{-1}, int64_t{0}, int64_t{5}, far, kMost}) {
          Scoring numbers;
          numbers.causal_offset = offset, numbers.window_left = left, numbers.window_right = right;
          expect_contract(bound, numbers);
          numbers.causal = true;
          expect_contract(bound, numbers);
          numbers.causal = false, numbers.causal_offset = {};
          expect_contract(bound, numbers);
        }
      }
    }
    for (int64_t first_query : {int64_t{0}, int64_t{3}, int64_t{1} << 31, far, kMost}) {
      for (int64_t first_key : {int64_t{0}, int64_t{2}, int64_t{1} << 40, far, kMost}) {
        for (int64_t offset : {kLeast, -far, int64_t{1}, far, kMost}) {
          Scoring numbers;
          numbers.causal = true, numbers.causal_offset = offset;
          numbers.first_query = first_query, numbers.first_key = first_key;
          expect_contract(bound, numbers);
        }
      }
    }
  }
}

// Kernels on the GPU add these numbers in 32 bits.
TEST(AttentionBounds, BoundedNumbersFit32Bits) {
  const int64_t far = int64_t{1} << 62;
  for (int64_t offset : {kLeast, -far, far, kMost}) {
    ForwardProblem problem =
        make_forward({.shape = {1, 1, kQueries, kKeys, 8}, .dtype = DType::kBFloat16, .device = {}});
    problem.scoring.causal_offset = offset;
    problem.scoring.window_left = far, problem.scoring.window_right = kMost, problem.scoring.first_key = far;
    problem.scoring.block_list.query_block = problem.scoring.block_list.key_block = kMost;
    const Sizes sizes = sizes_of(problem);
    EXPECT_FALSE(has_near_numbers(problem.scoring, sizes));
    bound_numbers(problem.scoring, sizes);
    EXPECT_TRUE(has_near_numbers(problem.scoring, sizes));
  }
}

TEST(AttentionBounds, TheTimeDoesNotGrowWithABlock) {
  const Bound<ForwardProblem> bound = make({1, 1, kQueries, kKeys, 8}, DType::kFloat32, {});
  OwnContext context;
  context->kernel_override = "cpu_tiles";  // with a list and without; few queries alone have another
  check_and_run(bound.problem, context);
  const std::vector<double> expected = values_of(bound.problem.output);
  int32_t one = 1, zero = 0;
  const TensorView counts = contiguous_view(&one, DType::kInt32, {1, 1, 1});
  const TensorView blocks = contiguous_view(&zero, DType::kInt32, {1, 1, 1, 1});
  for (int64_t size : {int64_t{12}, int64_t{1} << 30, int64_t{1} << 62, kMost}) {
    ForwardProblem listed = bound.problem;
    listed.scoring.block_list = {.query_block = size, .key_block = size, .key_counts = counts, .key_blocks = blocks};
    check_and_run(listed, context);
    EXPECT_EQ(values_of(listed.output), expected) << size;
  }
  for (int64_t size : {int64_t{0}, int64_t{-5}, kLeast}) {
    ForwardProblem listed = bound.problem;
    listed.scoring.block_list = {.query_block = size, .key_block = 4, .key_counts = counts, .key_blocks = blocks};
    EXPECT_THROW(check_and_run(listed, context), Error) << size;
  }
}

TEST(AttentionBounds, ThePairsOfACostAreCounted) {
  for (int64_t left : {-1, 0, 3, 40}) {
    for (int64_t right : {-1, 0, 2, 40}) {
      for (int64_t offset : {-20, -3, 0, 4, 9, 30}) {
        for (bool causal : {false, true}) {
          ForwardProblem problem =
              make_forward({.shape = {1, 1, kQueries, kKeys, 8}, .dtype = DType::kFloat32, .device = {}});
          Scoring& scoring = problem.scoring;
          scoring.window_left = left, scoring.window_right = right, scoring.causal = causal;
          scoring.causal_offset = offset;
          int64_t pairs = 0;
          for (int64_t q = 0; q < kQueries; ++q) {
            for (int64_t k = 0; k < kKeys; ++k) pairs += keeps(scoring, q, k);
          }
          EXPECT_EQ(kForward.cost(problem).flops, 2 * pairs * 16) << left << " " << right << " " << offset;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
