// What can be said of the product on Hopper without a GPU: its tiles fit a multiprocessor, and sizes get the tile that
// fills the GPU.
#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"

#include <gtest/gtest.h>

#include <set>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::product {
namespace {

constexpr int kMultiprocessors = 132;

std::string brief(const Sm90Config& config) {
  return concat("tile=", config.tile_m, "x", config.tile_n, " stages=", config.stages, " cluster=", config.cluster,
                config.splits ? " splits=k" : "");
}

std::string chosen(const Sm90Sizes& sizes, bool promoted = false, int64_t element_bytes = 2) {
  const std::span<const Sm90Config> configs = sm90_configs(promoted, false, true);
  return brief(configs[static_cast<size_t>(sm90_heuristic(configs, sizes, element_bytes, kMultiprocessors))]);
}

TEST(ProductSm90, EveryConfigIsLegalAndNamedOnce) {
  for (const bool promoted : {false, true}) {
    for (const bool factors : {false, true}) {
      std::set<std::string> names;
      for (const Sm90Config& config : sm90_configs(promoted, factors, true)) {
        EXPECT_TRUE(is_legal(config)) << config_text(config);
        EXPECT_LE(sm90_shared_bytes(config), kSm90SharedLimit) << config_text(config);
        EXPECT_EQ(config.factors, factors) << config_text(config);
        EXPECT_TRUE(names.insert(config_text(config)).second) << config_text(config);
        const auto parsed = parse_config<Sm90Config>(config_text(config));
        ASSERT_TRUE(parsed.has_value()) << config_text(config);
        EXPECT_EQ(config_text(*parsed), config_text(config));
        if (promoted || factors) {
          EXPECT_LE(config.tile_m * config.tile_n, 256 * 128) << config_text(config);
        }
      }
    }
  }
}

TEST(ProductSm90, EveryConfigOfGroupsIsLegalAndSharesNothingThatIsGathered) {
  for (const int gathers : {0, 1, 2}) {
    for (const Sm90Grouping grouping : {Sm90Grouping::kRows, Sm90Grouping::kDepth}) {
      if (grouping == Sm90Grouping::kRows && gathers == 2) continue;
      const Sm90Operands operands = {.a = Sm90Type::kBFloat16,
                                     .b = Sm90Type::kBFloat16,
                                     .a_rows = false,
                                     .b_columns = false,
                                     .grouping = grouping,
                                     .gathers_a = gathers == 1,
                                     .gathers_b = gathers == 2};
      for (const int sums : {0, 1, 2}) {
        std::set<std::string> names;
        for (const Sm90Config& config : sm90_grouped_configs(operands, sums > 0, sums > 1)) {
          EXPECT_TRUE(is_legal(config)) << config_text(config);
          EXPECT_TRUE(names.insert(config_text(config)).second) << config_text(config);
          EXPECT_FALSE(config.splits) << config_text(config);
          EXPECT_FALSE(sm90_across(config) > 1 && operands.gathers_a) << config_text(config);
          EXPECT_FALSE(sm90_down(config) > 1 && operands.gathers_b) << config_text(config);
        }
      }
    }
  }
}

TEST(ProductSm90, LargeSizesGetTheFastestTile) {
  for (const int64_t size : {4096, 8192, 16384}) {
    EXPECT_EQ(chosen({1, size, size, size}), "tile=128x256 stages=4 cluster=2") << size;
  }
  EXPECT_EQ(chosen({1, 8192, 14336, 4096}), "tile=128x256 stages=4 cluster=2");
  EXPECT_EQ(chosen({1, 4096, 4096, 4096}, true, 1), "tile=256x128 stages=4 cluster=2");  // four waves
  EXPECT_EQ(chosen({1, 8192, 8192, 8192}, true, 1), "tile=128x192 stages=4 cluster=2");
}

TEST(ProductSm90, SmallSizesGetMoreAndSmallerTilesOrPartsOfK) {
  EXPECT_EQ(chosen({1, 128, 4096, 4096}), "tile=128x128 stages=4 cluster=3 splits=k");
  EXPECT_EQ(chosen({1, 128, 14336, 4096}), "tile=128x128 stages=6 cluster=1");
  EXPECT_EQ(chosen({1, 128, 6144, 4096}), "tile=128x128 stages=5 cluster=2 splits=k");
  EXPECT_EQ(chosen({1, 128, 28672, 4096}), "tile=128x256 stages=4 cluster=1");
  EXPECT_EQ(chosen({1, 16, 1024, 16384}), "tile=128x128 stages=4 cluster=8 splits=k");
  EXPECT_EQ(chosen({1, 1024, 1024, 256}), "tile=128x128 stages=6 cluster=1");
  EXPECT_EQ(chosen({64, 128, 128, 128}), "tile=128x128 stages=6 cluster=1");
}

TEST(ProductSm90, WidthsOf192GetWholeWaves) {
  for (const int64_t columns : {768, 2304}) {  // 33 rows of tiles: 132 and 396 of them
    EXPECT_EQ(chosen({1, 4112, columns, 768}), "tile=128x192 stages=4 cluster=1") << columns;
  }
  EXPECT_EQ(chosen({1, 4112, 768, 3072}), "tile=128x192 stages=4 cluster=1");
  const std::span<const Sm90Config> all = sm90_configs(false, false, true), others = sm90_configs(false, false);
  ASSERT_EQ(others.size() + 1, all.size());  // a prefix: a config's number means the same in both
  for (size_t i = 0; i < others.size(); ++i) EXPECT_EQ(config_text(others[i]), config_text(all[i]));
}

TEST(ProductSm90, RefusesWhatItCannotCount) {
  EXPECT_EQ(sm90_size_obstacle({1, 1 << 20, 1 << 20, 1 << 20}), nullptr);
  EXPECT_NE(sm90_size_obstacle({1, int64_t{1} << 31, 128, 128}), nullptr);
  EXPECT_NE(sm90_size_obstacle({1 << 20, 1 << 14, 1 << 14, 8}), nullptr);
}

TEST(ProductSm90, CodeNamesEverythingThatMakesAKernel) {
  const Sm90Variant plain = {.config = sm90_configs(false, false)[0],
                             .operands = {Sm90Type::kBFloat16, Sm90Type::kBFloat16, false, false},
                             .epilogue = {},
                             .output = DType::kBFloat16};
  std::set<std::string> entries = {sm90_code(plain).entry};
  const auto differs = [&](Sm90Variant variant) { return entries.insert(sm90_code(variant).entry).second; };
  for (bool Sm90Epilogue::*flag : {&Sm90Epilogue::bias, &Sm90Epilogue::residual, &Sm90Epilogue::preactivation,
                                   &Sm90Epilogue::float_bias, &Sm90Epilogue::float_residual, &Sm90Epilogue::float_saved,
                                   &Sm90Epilogue::whole_vectors, &Sm90Epilogue::promoted, &Sm90Epilogue::amax}) {
    Sm90Variant variant = plain;
    variant.epilogue.*flag = true;
    EXPECT_TRUE(differs(variant));
  }
  Sm90Variant variant = plain;
  variant.epilogue.form = Sm90Form::kGated;
  EXPECT_TRUE(differs(variant));
  variant.epilogue.kind = pointwise::Kind::kSilu;
  EXPECT_TRUE(differs(variant));
  variant.epilogue.scaling = Sm90Scaling::kRows;
  EXPECT_TRUE(differs(variant));
  variant.operands.b_columns = true;
  EXPECT_TRUE(differs(variant));
  variant.output = DType::kFloat8E5M2;
  EXPECT_TRUE(differs(variant));
}

}  // namespace
}  // namespace kernel_pytorch::product
