#include "kernel_pytorch/base/config_fields.h"

#include <gtest/gtest.h>

namespace kernel_pytorch::config_fields_test {

enum class Source : uint8_t { kDirect, kRing };
struct Compiled {
  int threads = 32;
  Source source = Source::kDirect;
  bool clustered = false;
};
struct Launch {
  Compiled rows;
  int stages = 0;
  bool masks = true;
};
constexpr bool is_legal(const Launch& config) {
  return config.rows.threads % 32 == 0 && config.stages >= 0;
}

constexpr auto kCompiledFields =
    config_fields<Compiled>(config_field<&Compiled::threads>(), config_field<&Compiled::source>("direct ring"),
                            config_field<&Compiled::clustered>());
constexpr ConfigFields fields_of(const Compiled&) {
  return kCompiledFields;
}
constexpr auto kLaunchFields = config_fields<Launch>(config_field<&Launch::rows>(), config_field<&Launch::stages>(),
                                                     config_limit<&Launch::masks>());
constexpr ConfigFields fields_of(const Launch&) {
  return kLaunchFields;
}

struct Two {
  Compiled keys, queries;
};
constexpr auto kTwoFields = config_fields<Two>(config_part<&Two::keys>(), config_part<&Two::queries>());
constexpr ConfigFields fields_of(const Two&) {
  return kTwoFields;
}

constexpr Launch kTable[] = {
    {.rows = {.threads = 256, .source = Source::kRing, .clustered = true}, .stages = 4, .masks = false},
    {.rows = {.threads = 64}},
};
static_assert(are_legal(kTable));
constexpr Launch kOdd[] = {{.rows = {.threads = 33}}};
static_assert(!are_legal(kOdd));

TEST(ConfigFields, TextNamesEveryMember) {
  EXPECT_EQ(config_text(kTable[0]), "threads=256 source=ring clustered=1 stages=4");
  EXPECT_EQ(config_texts(kTable)[1], "threads=64 source=direct clustered=0 stages=0");
}

TEST(ConfigFields, TheTemplateArgumentNamesTypesAndMembers) {
  EXPECT_EQ(device_text(kTable[0].rows),
            "kernel_pytorch::config_fields_test::Compiled{.threads = 256, "
            ".source = kernel_pytorch::config_fields_test::Source(1), .clustered = true}");
  EXPECT_EQ(device_text(kTable[1]),
            "kernel_pytorch::config_fields_test::Launch{.rows = kernel_pytorch::config_fields_test::Compiled{"
            ".threads = 64, .source = kernel_pytorch::config_fields_test::Source(0), .clustered = false}, "
            ".stages = 0}");
}

TEST(ConfigFields, ATextIsParsedBack) {
  for (const Launch& config : kTable) {
    const auto parsed = parse_config<Launch>(config_text(config));
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(config_text(*parsed), config_text(config));
  }
}

TEST(ConfigFields, PartsOfOneTypeAreNamedAfterTheirMember) {
  const Two two{.keys = {.threads = 64}, .queries = {.threads = 128, .source = Source::kRing}};
  const std::string text = config_text(two);
  EXPECT_EQ(text,
            "keys_threads=64 keys_source=direct keys_clustered=0 "
            "queries_threads=128 queries_source=ring queries_clustered=0");
  const auto parsed = parse_config<Two>(text);
  ASSERT_TRUE(parsed.has_value());
  EXPECT_EQ(config_text(*parsed), text);
  EXPECT_FALSE(parse_config<Two>("threads=64 source=direct clustered=0 threads=128 source=ring clustered=0"));
}

TEST(ConfigFields, DamagedTextsAreNone) {
  for (const char* text :
       {"", "threads=64", "threads=64 source=direct clustered=0", "threads=64 source=direct",
        "threads= source=direct clustered=0 stages=0", "threads=64 source=ringed clustered=0 stages=0",
        "threads=64 source= clustered=0 stages=0", "threads=64 source=direct clustered=2 stages=0",
        "threads=64x source=direct clustered=0 stages=0", "threads=64 source=direct clustered=0 stages=0 x",
        "source=direct threads=64 clustered=0 stages=0", "threadsy=64 source=direct clustered=0 stages=0",
        "threads=99999999999 source=direct clustered=0 stages=0"}) {
    EXPECT_FALSE(parse_config<Launch>(text).has_value()) << text;
  }
}

TEST(ConfigFields, AnIllegalConfigIsNone) {
  EXPECT_FALSE(parse_config<Launch>("threads=33 source=direct clustered=0 stages=0").has_value());
  EXPECT_FALSE(parse_config<Launch>("threads=64 source=direct clustered=0 stages=-1").has_value());
}

}  // namespace kernel_pytorch::config_fields_test
