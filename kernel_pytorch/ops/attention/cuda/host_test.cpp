// What can be said of attention's CUDA kernels without a GPU: ranges of tiles against the rule they stand for, features
// and their text, and which kernel takes which problem.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/cuda_mma/tiles.h"
#include "kernel_pytorch/ops/attention/trial.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::attention {
namespace {

bool keeps(const Features& features, const Head& head, int32_t query, int32_t key) {
  if (features.right_bound && key > query + head.right) return false;
  return !features.left_bound || key >= query + head.left;
}

// `sees(row, other)`: whether a row of the tile sees another of the range.
template <class Sees>
void expect_range(const TileRange& range, int32_t rows, int32_t others, const Sees& sees) {
  for (int32_t other = 0; other < others; ++other) {
    int32_t seen = 0;
    for (int32_t row = 0; row < rows; ++row) seen += sees(row, other) ? 1 : 0;
    if (seen > 0) {
      ASSERT_TRUE(other >= range.first && other < range.last) << other;
    }
    if (other >= range.whole_first && other < range.whole_last) {
      ASSERT_EQ(seen, rows) << other;
    }
  }
}

TEST(AttentionTiles, RangesHoldWhatTheirRowsSee) {
  std::mt19937 random(7);
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  for (int trial = 0; trial < 4000; ++trial) {
    Features features;
    features.right_bound = draw(0, 1) == 1;
    features.left_bound = draw(0, 1) == 1;
    Head head{};
    head.queries = draw(1, 40);
    head.keys = draw(1, 40);
    const int32_t offset = draw(-30, 30);
    head.left = offset - draw(0, 20);
    head.right = offset + draw(0, 10);
    const int32_t query = draw(0, head.queries - 1), queries = draw(1, head.queries - query);
    expect_range(keys_of_queries(features, head, query, query + queries), queries, head.keys,
                 [&](int32_t row, int32_t key) { return keeps(features, head, query + row, key); });
    const int32_t key = draw(0, head.keys - 1), keys = draw(1, head.keys - key);
    expect_range(queries_of_keys(features, head, key, key + keys), keys, head.queries,
                 [&](int32_t row, int32_t other) { return keeps(features, head, other, key + row); });
  }
}

TEST(AttentionTiles, CausalRangesAreExact) {
  const Features causal{.right_bound = true};
  Head head{};
  head.queries = head.keys = 256;
  const TileRange keys = keys_of_queries(causal, head, 64, 128);
  EXPECT_EQ(keys.last, 128);
  EXPECT_EQ(keys.whole_last, 65);
  const TileRange queries = queries_of_keys(causal, head, 64, 128);
  EXPECT_EQ(queries.first, 64);
  EXPECT_EQ(queries.whole_first, 127);
}

TEST(AttentionTiles, SplitsShareTheKeysOfADecodingStep) {
  std::mt19937 random(11);
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  constexpr int32_t kStep = 64;
  for (int trial = 0; trial < 2000; ++trial) {
    TileRange range{};
    range.last = draw(0, 5000);
    range.first = draw(0, range.last);
    const bool is_fixed = trial % 2 == 0;
    const int32_t split_keys = is_fixed ? 1024 : 0, splits = is_fixed ? 5 : draw(1, 40);
    int32_t next = range.first;  // the first key that no split has taken
    for (int32_t split = 0; split < splits; ++split) {
      const KeySplit keys = decode_split(range, split, splits, split_keys, kStep);
      ASSERT_EQ(keys.first % kDecodeKeys, 0);
      if (keys.first >= keys.last || next >= range.last) continue;
      ASSERT_LE(keys.first, next);
      ASSERT_GT(keys.first + kStep, next);
      ASSERT_LE(keys.last, range.last);
      next = keys.last;
    }
    ASSERT_EQ(next, range.last);
  }
}

TEST(AttentionFeatures, EveryOptionIsABitAndAWordOfTheText) {
  std::set<uint32_t> bits;
  std::set<std::string> texts;
  const std::vector<NamedFeatures> list = compiled_features();
  for (const NamedFeatures& named : list) {
    bits.insert(bits_of(named.features));
    texts.insert(device_text(named.features));
    EXPECT_EQ(!named.generated.empty(), named.features.score_mod || named.features.mask_mod) << named.name;
  }
  EXPECT_EQ(bits.size(), list.size());
  EXPECT_EQ(texts.size(), list.size());
  EXPECT_TRUE(device_text(Features{.right_bound = true})
                  .starts_with("kernel_pytorch::attention::Features{.right_bound = true, .left_bound = false, "));
}

Features features_of_options(std::vector<std::pair<std::string, std::string>> options) {
  const registry::ProblemRequest request{
      .shape = {2, 4, 96, 96, 64}, .dtype = DType::kBFloat16, .device = {}, .options = std::move(options)};
  return features_of(registry::make_problem(kForward, request).scoring);
}

TEST(AttentionFeatures, FollowTheProblem) {
  EXPECT_EQ(bits_of(features_of_options({})), bits_of(Features{}));
  EXPECT_TRUE(features_of_options({{"causal", "1"}}).right_bound);
  const Features window = features_of_options({{"window_left", "5"}});
  EXPECT_TRUE(window.left_bound && !window.right_bound);
  EXPECT_TRUE(features_of_options({{"causal", "1"}, {"alibi", "1"}}).alibi_is_one_sided);
  EXPECT_FALSE(features_of_options({{"alibi", "1"}}).alibi_is_one_sided);
  EXPECT_TRUE(features_of_options({{"scale", "-1"}}).scaled);
  EXPECT_TRUE(features_of_options({{"softcap", "2"}, {"softcap_after_bias", "1"}}).softcap);  // nothing stands between
  const Features capped = features_of_options({{"softcap", "2"}, {"softcap_after_bias", "1"}, {"bias", "full"}});
  EXPECT_TRUE(capped.softcap_after && !capped.softcap);
}

TEST(AttentionFeatures, ListsOfOtherTilesBecomeAMap) {
  const registry::ProblemRequest request{
      .shape = {1, 2, 256, 256, 64}, .dtype = DType::kBFloat16, .device = {}, .options = {{"blocks", "64"}}};
  const Scoring scoring = registry::make_problem(kForward, request).scoring;
  EXPECT_TRUE(features_of(scoring, 64, 32).blocks);
  EXPECT_TRUE(features_of(scoring, 128, 32).block_map);
  EXPECT_FALSE(features_of(scoring, 128, 32).blocks);
}

std::string key_of(DType dtype, std::vector<std::pair<std::string, std::string>> options) {
  const registry::ProblemRequest request{.shape = {1, 2, 64, 64}, .dtype = dtype, .device = {}, .options = options};
  std::string text;
  tuning::KeyBuilder key(&text);
  kForward.describe(registry::make_problem(kForward, request), key);
  return text;
}

TEST(AttentionFeatures, Tf32IsAProblemOfItsOwnInFp32Alone) {
  EXPECT_NE(key_of(DType::kFloat32, {{"allow_tf32", "1"}}), key_of(DType::kFloat32, {}));
  EXPECT_EQ(key_of(DType::kBFloat16, {{"allow_tf32", "1"}}), key_of(DType::kBFloat16, {}));
}

DeviceInfo hopper() {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = 9;
  device.cuda.shared_bytes_per_block = 232448;
  device.cuda.multiprocessors = 132;
  return device;
}

bool takes(const registry::Kernel<ForwardProblem>& kernel, std::vector<int64_t> shape, DType dtype,
           std::vector<std::pair<std::string, std::string>> options) {
  const registry::ProblemRequest request{
      .shape = std::move(shape), .dtype = dtype, .device = {DeviceKind::kCuda, 0}, .options = std::move(options)};
  return static_cast<bool>(kernel.supports(registry::make_problem(kForward, request), hopper()));
}

TEST(AttentionKernels, DecodingIsForFewRowsThatShareKeys) {
  EXPECT_TRUE(takes(kForwardCudaDecode, {8, 64, 1, 8192, 128}, DType::kBFloat16, {{"key_heads", "8"}}));
  EXPECT_TRUE(takes(kForwardCudaDecode, {8, 64, 8, 8192, 128}, DType::kFloat16, {{"key_heads", "8"}}));
  EXPECT_FALSE(takes(kForwardCudaDecode, {8, 64, 9, 8192, 128}, DType::kFloat16, {{"key_heads", "8"}}));
  EXPECT_FALSE(takes(kForwardCudaDecode, {8, 64, 128, 8192, 128}, DType::kBFloat16, {}));
  EXPECT_FALSE(takes(kForwardCudaDecode, {1, 4, 1, 64, 512}, DType::kBFloat16, {}));
  EXPECT_TRUE(takes(kForwardCudaDecode, {1, 4, 1, 64, 128}, DType::kFloat32, {}));
  EXPECT_FALSE(takes(kForwardCudaDecode, {1, 4, 1, 64, 192}, DType::kFloat32, {}));
  EXPECT_FALSE(takes(kForwardCudaDecode, {1, 4, 1, 64, 128}, DType::kFloat32, {{"accumulate", "1"}}));
}

TEST(AttentionKernels, TheGeneralOneTakesEveryOptionAndSize) {
  for (const char* size : {"8", "64", "72", "96", "128", "192", "256", "512", "20"}) {
    for (const DType dtype : kCudaTypes) {
      EXPECT_TRUE(takes(kForwardCudaMma, {1, 2, 100, 130, std::stoll(size)}, dtype, {{"causal", "1"}}))
          << size << " " << name_of(dtype);
    }
  }
  EXPECT_TRUE(takes(kForwardCudaMma, {1, 2, 100, 130, 64}, DType::kFloat16,
                    {{"blocks", "16"}, {"dropout", "0.5"}, {"bias", "full"}, {"mask", "full"}, {"segments", "1"}}));
  EXPECT_FALSE(takes(kForwardCudaMma, {1, 2, 100, 130, 64}, DType::kFloat64, {}));
  EXPECT_FALSE(takes(kForwardCudaMma, {1, 2, 100, 130, 520}, DType::kBFloat16, {}));
}

TEST(AttentionKernels, Fp32FitsBlocksOfLessSharedMemory) {
  DeviceInfo device = hopper();
  device.cuda.compute_major = 8;
  device.cuda.compute_minor = 6;
  device.cuda.shared_bytes_per_block = 101376;
  for (const int64_t size : {64, 96, 128}) {
    const registry::ProblemRequest request{.shape = {1, 2, 100, 130, size},
                                           .dtype = DType::kFloat32,
                                           .device = {DeviceKind::kCuda, 0},
                                           .options = {{"causal", "1"}}};
    EXPECT_TRUE(static_cast<bool>(kForwardCudaMma.supports(registry::make_problem(kForward, request), device))) << size;
    EXPECT_TRUE(static_cast<bool>(kBackwardCudaMma.supports(registry::make_problem(kBackward, request), device)))
        << size;
  }
}

// GPUs whose blocks have less shared memory take smaller tiles: `kpt compile` for them compiles those.
TEST(AttentionKernels, ABundleHoldsTheTilesOfItsGpus) {
  struct Gpu {
    const char* architecture;
    int major, minor, shared_kib;
  };
  for (const Gpu& gpu : {Gpu{"gfx90a", 0, 0, 64}, Gpu{"sm_80", 8, 0, 163}, Gpu{"sm_86", 8, 6, 99},
                         Gpu{"sm_90a", 9, 0, 227}, Gpu{"sm_120a", 12, 0, 99}}) {
    DeviceInfo device = hopper();
    device.cuda.compute_major = gpu.major, device.cuda.compute_minor = gpu.minor;
    device.cuda.shared_bytes_per_block = int64_t{gpu.shared_kib} << 10;
    if (gpu.major == 0) device.cuda.gfx = gpu.architecture;
    std::string compiled;
    for (const DeviceCode& code : kForwardCudaMma.device_code()) {
      if (jit::can_run(code, gpu.architecture)) compiled += code.entry + "\n";
    }
    for (const int64_t size : {64, 96, 128, 192, 256}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        const registry::ProblemRequest request{.shape = {1, 2, 100, 130, size},
                                               .dtype = dtype,
                                               .device = {DeviceKind::kCuda, 0},
                                               .options = {{"causal", "1"}}};
        const auto problem = registry::make_problem(kForward, request);
        if (!kForwardCudaMma.supports(problem, device)) continue;
        const auto tile = parse_config<MmaTile>(kForwardCudaMma.configs(problem, device)[0]);
        ASSERT_TRUE(tile);
        EXPECT_NE(compiled.find(device_text(*tile)), std::string::npos)
            << gpu.architecture << " " << device_text(*tile);
        EXPECT_TRUE(gpu.major != 0 || tile->row_blocks == 1);
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
