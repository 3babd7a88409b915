#include "kernel_pytorch/base/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kernel_pytorch {
namespace {

// The known answers that come with the Random123 library for philox4x32-7.
TEST(Philox, GivesTheKnownAnswers) {
  const PhiloxBlock zero = philox(0, 0, 0);
  EXPECT_EQ(zero.words[0], 0x5f6fb709u);
  EXPECT_EQ(zero.words[1], 0x0d893f64u);
  EXPECT_EQ(zero.words[2], 0x4f121f81u);
  EXPECT_EQ(zero.words[3], 0x4f730a48u);
  const PhiloxBlock ones = philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0});
  EXPECT_EQ(ones.words[0], 0x5207ddc2u);
  EXPECT_EQ(ones.words[1], 0x45165e59u);
  EXPECT_EQ(ones.words[2], 0x4d8ee751u);
  EXPECT_EQ(ones.words[3], 0x8c52f662u);
  const PhiloxBlock digits = philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88);
  EXPECT_EQ(digits.words[0], 0x4dfccabau);
  EXPECT_EQ(digits.words[1], 0x190a87f0u);
  EXPECT_EQ(digits.words[2], 0xc47362bau);
  EXPECT_EQ(digits.words[3], 0xb6b5242au);
}

TEST(Philox, BitsOfElementsCoverTheBlock) {
  const PhiloxBlock block{{0x00020001, 0x00040003, 0x00060005, 0x00080007}};
  for (int i = 0; i < kPhiloxElements; ++i) EXPECT_EQ(block.bits(i), static_cast<uint32_t>(i + 1));
}

TEST(Philox, DropoutIsUnbiased) {
  for (double probability : {0.0, 0.1, 0.3, 0.5, 0.999, 1.0}) {
    const uint32_t threshold = dropout_threshold(probability);
    const double kept = (65536.0 - threshold) / 65536;
    EXPECT_NEAR(kept, 1 - probability, 1e-5);
    EXPECT_NEAR(kept * dropout_scale(probability), threshold == 65536 ? 0 : 1, 1e-6);
  }
}

}  // namespace
}  // namespace kernel_pytorch
