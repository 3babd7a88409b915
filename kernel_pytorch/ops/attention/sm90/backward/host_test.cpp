// What can be said of the sm_90 backward without a GPU: places in records and among tiles, and which problems it takes.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "kernel_pytorch/ops/attention/sm90/backward/tile_cuda.h"
#include "kernel_pytorch/ops/attention/trial.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::attention {
namespace {

TEST(AttentionSm90Backward, ARecordHasAPlaceForEachQuery) {
  std::set<int> places;
  for (int query = 0; query < 128; ++query) {
    EXPECT_EQ(record_place(query) / 64, query / 64);
    places.insert(record_place(query));
  }
  EXPECT_EQ(places.size(), 128u);
  EXPECT_EQ(*places.rbegin(), 127);
  // Lane 1 of a quad holds columns 2 and 3 of each eight: its first vector.
  EXPECT_EQ(record_place(2), 4);
  EXPECT_EQ(record_place(3), 5);
  EXPECT_EQ(record_place(10), 6);
}

TEST(AttentionSm90Backward, PackedSequencesShareNoTile) {
  std::mt19937 random(3);
  for (int rows : {64, 128}) {
    int64_t offset = 0, end = 0;
    for (int sequence = 0; sequence < 500; ++sequence) {
      const int64_t length = random() % 4 == 0 ? 0 : random() % 300;
      const int64_t first = tiles_before(offset, sequence, rows);
      EXPECT_GE(first, end) << sequence;
      end = first + (length + rows - 1) / rows;
      offset += length;
    }
    EXPECT_LE(end, tiles_before(offset, 500, rows));  // what scratch is made for
  }
}

const char* reason_of(std::vector<int64_t> shape, DType dtype, std::vector<std::pair<std::string, std::string>> options,
                      int major = 9) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = major;
  const registry::ProblemRequest request{
      .shape = std::move(shape), .dtype = dtype, .device = device.device, .options = std::move(options)};
  static std::string reason;
  reason = kBackwardSm90.supports(registry::make_problem(kBackward, request), device).reason();
  return reason.c_str();
}

std::vector<std::string> configs_of(std::vector<int64_t> shape, DType dtype,
                                    std::vector<std::pair<std::string, std::string>> options) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = 9;
  const registry::ProblemRequest request{
      .shape = std::move(shape), .dtype = dtype, .device = device.device, .options = std::move(options)};
  return kBackwardSm90.configs(registry::make_problem(kBackward, request), device);
}

// The tuner chooses between the tile with the most columns of sums and the one with the most registers for scores.
TEST(AttentionSm90Backward, TilesAreConfigsAndHeavyFeaturesLeaveOne) {
  for (int64_t size : {64, 96, 128, 192, 256}) {
    const std::vector<int64_t> shape{1, 4, 128, 128, size};
    const std::vector<std::string> light = configs_of(shape, DType::kBFloat16, {{"causal", "1"}});
    ASSERT_EQ(light.size(), 2u) << size;
    EXPECT_NE(light[0], light[1]);
    EXPECT_EQ(configs_of(shape, DType::kFloat16, {}), std::vector<std::string>{light[1]}) << size;
    EXPECT_EQ(configs_of(shape, DType::kBFloat16, {{"alibi", "1"}}), std::vector<std::string>{light[1]}) << size;
    const std::vector<std::string> fixed = configs_of(shape, DType::kBFloat16, {{"deterministic", "1"}});
    EXPECT_NE(fixed[0].find("in_turns=1"), std::string::npos) << fixed[0];
  }
}

TEST(AttentionSm90Backward, TakesHalfTypesAndHeadsUpTo256) {
  for (int64_t size : {8, 40, 64, 96, 128, 192, 256}) {
    EXPECT_STREQ(reason_of({1, 4, 100, 130, size}, DType::kBFloat16, {{"causal", "1"}, {"key_heads", "2"}}), "");
    EXPECT_STREQ(reason_of({1, 4, 100, 130, size}, DType::kFloat16, {{"grad_lse", "1"}}), "");
  }
  EXPECT_STRNE(reason_of({1, 2, 64, 512}, DType::kBFloat16, {}), "");
  EXPECT_STRNE(reason_of({1, 2, 64, 20}, DType::kBFloat16, {}), "");
  EXPECT_STRNE(reason_of({1, 2, 64, 64}, DType::kFloat32, {}), "");
  EXPECT_STRNE(reason_of({1, 2, 64, 64}, DType::kBFloat16, {}, 8), "");
  EXPECT_STRNE(reason_of({1, 2, 64, 64}, DType::kBFloat16, {}, 10), "");
}

TEST(AttentionSm90Backward, TakesOptionsOfEveryHeadSize) {
  for (int64_t size : {64, 96, 128, 192, 256}) {
    const std::vector<int64_t> shape{1, 4, 128, 128, size};
    for (const char* word : {"alibi", "segments", "lengths", "deterministic", "grad_lse", "sinks"}) {
      EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{word, "1"}}), "") << word;
      EXPECT_STREQ(reason_of(shape, DType::kFloat16, {{word, "1"}}), "") << word;
    }
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"window_left", "9"}, {"mask", "full"}}), "");
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"sequences", "4"}, {"causal", "1"}}), "");
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"bias", "batch"}, {"grad_bias", "0"}}), "");
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"blocks", "32"}}), "");
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"sequences", "4"}, {"blocks", "64"}}), "");
    EXPECT_STRNE(reason_of(shape, DType::kBFloat16, {{"bias", "batch"}}), "");
    EXPECT_STRNE(reason_of(shape, DType::kBFloat16, {{"deterministic", "1"}, {"segments", "1"}}), "");
  }
}

TEST(AttentionSm90Backward, TakesPartsOfAWhole) {
  for (int64_t size : {64, 96, 128, 192, 256}) {
    const std::vector<int64_t> shape{1, 4, 128, 128, size};
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"accumulate", "1"}, {"causal", "1"}}), "") << size;
    EXPECT_STREQ(reason_of(shape, DType::kFloat16, {{"results", "fp32"}}), "") << size;
    EXPECT_STREQ(reason_of(shape, DType::kBFloat16, {{"accumulate", "1"}, {"sequences", "3"}}), "") << size;
    EXPECT_STRNE(reason_of(shape, DType::kBFloat16, {{"results", "fp32"}, {"sequences", "3"}}), "") << size;
  }
}

TEST(AttentionSm90Backward, LeavesToOthersWhatItHasNoRegistersOrBitsFor) {
  const std::vector<int64_t> small{1, 4, 128, 128, 64}, large{1, 4, 128, 128, 128}, wide{1, 4, 128, 128, 256};
  const std::vector<std::pair<std::string, std::string>> biased{
      {"bias", "all"}, {"grad_bias", "0"}, {"dropout", "0.1"}};
  EXPECT_STREQ(reason_of(small, DType::kBFloat16, biased), "");
  EXPECT_STRNE(reason_of(large, DType::kBFloat16, biased), "");
  for (const char* word : {"dropout", "softcap"}) {
    EXPECT_STREQ(reason_of(large, DType::kBFloat16, {{word, "0.5"}}), "") << word;
    EXPECT_STRNE(reason_of(wide, DType::kBFloat16, {{word, "0.5"}}), "") << word;
    EXPECT_STRNE(reason_of(large, DType::kFloat16, {{word, "0.5"}}), "") << word;
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
