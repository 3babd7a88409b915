// What can be said of the forward on Hopper without a GPU: which problems it takes, why it passes on others, and that
// every config it names fits a multiprocessor.
#include <gtest/gtest.h>

#include "kernel_pytorch/ops/attention/sm90/forward/config.h"
#include "kernel_pytorch/ops/attention/trial.h"

namespace kernel_pytorch::attention {
namespace {

using Words = std::vector<std::pair<std::string, std::string>>;

DeviceInfo gpu(int major) {
  DeviceInfo info;
  info.device = {DeviceKind::kCuda, 0};
  info.cuda.compute_major = major;
  info.cuda.multiprocessors = 132;
  return info;
}

ForwardProblem problem(std::vector<int64_t> shape, Words words, DType dtype = DType::kBFloat16) {
  return make_forward(
      {.shape = std::move(shape), .dtype = dtype, .device = {DeviceKind::kCuda, 0}, .options = std::move(words)});
}

std::string answer(const ForwardProblem& forward, int major = 9) {
  const registry::Support support = kForwardSm90.supports(forward, gpu(major));
  return support ? "yes" : std::string(support.reason());
}

TEST(AttentionSm90Forward, TakesWhatTheCopyEngineCanRead) {
  for (int64_t size : {8, 40, 64, 96, 128, 192, 256}) {
    EXPECT_EQ(answer(problem({1, 2, 100, size}, {{"causal", "1"}})), "yes") << size;
    EXPECT_EQ(answer(problem({1, 2, 100, 200, size}, {{"layout", "bshd"}})), "yes") << size;
  }
  EXPECT_EQ(answer(problem({1, 2, 100, 200, 128}, {{"layout", "bshd"}, {"window_left", "9"}})), "yes");
  EXPECT_EQ(answer(problem({1, 8, 100, 200, 192}, {{"value_size", "128"}, {"key_heads", "2"}})), "yes");
  EXPECT_EQ(answer(problem({1, 2, 300, 128}, {{"sequences", "3"}, {"causal", "1"}})), "yes");
}

TEST(AttentionSm90Forward, TakesEveryOption) {
  const std::vector<Words> options = {
      {{"window_left", "20"}, {"window_right", "5"}},
      {{"alibi", "1"}},
      {{"alibi", "1"}, {"causal", "1"}},
      {{"bias", "full"}},
      {{"bias", "batch"}, {"bias_dtype", "fp32"}},
      {{"mask", "full"}},
      {{"softcap", "2"}},
      {{"bias", "full"}, {"softcap", "2"}, {"softcap_after_bias", "1"}},
      {{"sinks", "1"}},
      {{"segments", "1"}, {"causal", "1"}},
      {{"lengths", "1"}},
      {{"blocks", "128"}},
      {{"dropout", "0.3"}},
      {{"scale", "-0.3"}},
      {{"batch_invariant", "1"}},
      {{"sequences", "3"}, {"window_left", "9"}},
      {{"sequences", "3"}, {"blocks", "128"}, {"causal", "1"}},
      {{"segments", "1"}, {"blocks", "128"}},
  };
  for (int64_t size : {40, 64, 96, 128, 192, 256}) {
    for (const Words& words : options) {
      EXPECT_EQ(answer(problem({1, 2, 256, size}, words)), "yes") << size << " " << words[0].first;
      EXPECT_EQ(answer(problem({1, 2, 256, size}, words, DType::kFloat16)), "yes") << size << " " << words[0].first;
    }
  }
}

TEST(AttentionSm90Forward, TakesPartsOfAWhole) {
  for (int64_t size : {64, 96, 128, 192, 256}) {
    EXPECT_EQ(answer(problem({1, 2, 256, size}, {{"results", "fp32"}})), "yes") << size;
    EXPECT_EQ(answer(problem({1, 2, 256, size}, {{"accumulate", "1"}, {"causal", "1"}})), "yes") << size;
    EXPECT_EQ(answer(problem({1, 2, 256, size}, {{"accumulate", "1"}, {"blocks", "128"}})), "yes") << size;
  }
  EXPECT_EQ(answer(problem({1, 2, 300, 128}, {{"accumulate", "1"}, {"sequences", "3"}})), "yes");
  EXPECT_NE(answer(problem({1, 2, 300, 128}, {{"results", "fp32"}, {"sequences", "3"}})).find("packed"),
            std::string::npos);
  EXPECT_NE(answer(problem({1, 2, 256, 128}, {{"accumulate", "1"}, {"dropout", "1"}})).find("keeps nothing"),
            std::string::npos);
}

TEST(AttentionSm90Forward, SaysWhyNot) {
  EXPECT_NE(answer(problem({1, 2, 100, 64}, {}), 10).find("compute capability 9.0"), std::string::npos);
  EXPECT_NE(answer(problem({1, 2, 100, 64}, {}, DType::kFloat32)).find("bf16 and fp16"), std::string::npos);
  EXPECT_NE(answer(problem({1, 2, 100, 20}, {})).find("multiples of 8"), std::string::npos);
  EXPECT_NE(answer(problem({1, 2, 100, 512}, {})).find("up to 256"), std::string::npos);
  EXPECT_NE(answer(problem({1, 2, 100, 0, 64}, {})).find("nothing"), std::string::npos);
  ForwardProblem moved = problem({1, 2, 100, 64}, {});
  moved.key.strides[2] += 1;
  EXPECT_NE(answer(moved).find("16 bytes"), std::string::npos);
}

TEST(AttentionSm90Forward, ConfigsHoldTheHeadAndFitSharedMemory) {
  for (int64_t size : {8, 64, 72, 128, 160, 256}) {
    for (const char* option : {"causal", "alibi", "segments"}) {
      const auto texts = kForwardSm90.configs(problem({1, 2, 100, size}, {{option, "1"}}), gpu(9));
      ASSERT_FALSE(texts.empty()) << size << option;
      for (const std::string& text : texts) {
        const auto config = parse_config<Sm90Config>(text);
        ASSERT_TRUE(config.has_value()) << text;
        EXPECT_GE(config->head_size, size);
        EXPECT_GE(config->value_size, size);
        EXPECT_LE(sm90_shared_bytes(*config), kSm90SharedLimit) << text;
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
