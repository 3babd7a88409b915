#include "kernel_pytorch/registry/trial.h"
#include "kernel_pytorch/registry/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernel_pytorch/registry/compare.h"
#include "kernel_pytorch/registry/erase.h"
#include "kernel_pytorch/registry/random_fill.h"
#include "kernel_pytorch/registry/request_options.h"
#include "kernel_pytorch/registry/toy_operation_test.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::registry {
namespace {

TEST(Compare, AllowsWhatTheTableAllows) {
  float reference[4] = {1, -2, 100, 0};
  float actual[4] = {1.000005f, -2.00001f, 100.0005f, 0.0005f};  // the last within 1e-5 of the largest
  const auto view = [](float* data) { return contiguous_view(data, DType::kFloat32, {2, 2}); };
  EXPECT_EQ(compare(view(actual), view(reference), tolerance_for({DType::kFloat32}, 1)), "");
  actual[1] = -2.01f;
  const std::string text = compare(view(actual), view(reference), tolerance_for({DType::kFloat32}, 1));
  EXPECT_EQ(text.find("1 of 4 elements differ; worst at [0, 1]: -2.01 instead of -2"), 0u) << text;
}

TEST(Compare, NanAndInfinityMustMatch) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  float reference[3] = {kNan, kInfinity, 1};
  const auto equal_to = [&](float a, float b, float c) {
    float actual[3] = {a, b, c};
    return compare(contiguous_view(actual, DType::kFloat32, {3}), contiguous_view(reference, DType::kFloat32, {3}),
                   tolerance_for({DType::kFloat32}, 1))
        .empty();
  };
  EXPECT_TRUE(equal_to(kNan, kInfinity, 1));
  EXPECT_FALSE(equal_to(0, kInfinity, 1));
  EXPECT_FALSE(equal_to(kNan, -kInfinity, 1));
  EXPECT_FALSE(equal_to(kNan, 3e38f, 1));
  EXPECT_FALSE(equal_to(kNan, kInfinity, kNan));
  EXPECT_FALSE(equal_to(kNan, kInfinity, kInfinity));
}

TEST(Compare, UnwrittenElementsAreNamedInEveryType) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    std::vector<unsigned char> reference(8 * 4, 0), actual(8 * 4, 0);
    for (int64_t byte = 0; byte < size_of(dtype); ++byte)
      actual[static_cast<size_t>(2 * size_of(dtype) + byte)] = kPoisonByte;
    const std::string text = compare(contiguous_view(actual.data(), dtype, {4}),
                                     contiguous_view(reference.data(), dtype, {4}), tolerance_for({dtype}, 1));
    EXPECT_NE(text.find("1 of 4 elements differ, 1 of them were not written; worst at [2]"), std::string::npos) << text;
  }
}

TEST(Compare, DenormalsMayDifferByTheirOneStep) {
  const Float16 reference[] = {{88}, {0x3c00}}, near[] = {{87}, {0x3c00}}, far[] = {{86}, {0x3c00}};
  const auto compared = [&](const Float16* actual) {
    return compare(contiguous_view(const_cast<Float16*>(actual), DType::kFloat16, {1}),
                   contiguous_view(const_cast<Float16*>(reference), DType::kFloat16, {1}),
                   tolerance_for({DType::kFloat16}, 1));
  };
  EXPECT_EQ(compared(near), "");
  EXPECT_NE(compared(far), "");
}

TEST(Compare, HonoursStrides) {
  float reference[6] = {1, 2, 3, 4, 5, 6};
  float actual[8] = {1, 2, 3, 99, 4, 5, 6, 99};
  TensorView strided = contiguous_view(actual, DType::kFloat32, {2, 3});
  strided.strides[0] = 4;
  EXPECT_EQ(compare(strided, contiguous_view(reference, DType::kFloat32, {2, 3}), tolerance_for({DType::kFloat32}, 1)),
            "");
}

TEST(Compare, LongSumsMayDifferMoreThanShortOnes) {
  EXPECT_EQ(tolerance_for({DType::kFloat32}, 1).absolute, tolerance_for({DType::kFloat32}, 1024).absolute);
  EXPECT_NEAR(tolerance_for({DType::kFloat32}, 1 << 20).absolute, 32e-5, 1e-9);
  EXPECT_EQ(tolerance_for({DType::kInt32}, 1 << 20).absolute, 0);
  EXPECT_EQ(tolerance_for({DType::kFloat32, 0x1p-11}, 1).absolute, 0x1p-11);
  EXPECT_EQ(tolerance_for({DType::kBFloat16, 0x1p-11}, 1).absolute, tolerance_for({DType::kBFloat16}, 1).absolute);
}

TEST(RandomFill, IsCentredWithUnitVarianceAndRepeats) {
  constexpr int64_t kCount = 200000;
  std::vector<float> values(kCount), again(kCount), other(kCount);
  OwnContext context;
  fill_random(values.data(), DType::kFloat32, kCount, {}, 5, context->threads);
  fill_random(again.data(), DType::kFloat32, kCount, {}, 5, nullptr);
  fill_random(other.data(), DType::kFloat32, kCount, {}, 6, nullptr);
  EXPECT_EQ(values, again);
  EXPECT_NE(values, other);
  double sum = 0, squares = 0, products = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    sum += values[i];
    squares += double{values[i]} * values[i];
    products += i > 0 ? double{values[i]} * values[i - 1] : 0;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
  EXPECT_NEAR(products / kCount, 0, 0.02);
  fill_random(values.data(), DType::kFloat32, kCount, {.content = Content::kPositive}, 5, nullptr);
  for (const float value : values) ASSERT_GE(value, 0.5f);
}

TEST(RandomFill, EveryTypeIsFilledWithOrdinaryValues) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    std::vector<unsigned char> bytes(1000 * 8);
    fill_random(bytes.data(), dtype, 1000, {}, 1, nullptr);
    double largest = 0;
    for (int64_t k = 0; k < 1000; ++k) {
      const double value = load_element(bytes.data(), dtype, k);
      ASSERT_TRUE(std::isfinite(value));
      largest = std::max(largest, std::fabs(value));
    }
    EXPECT_GE(largest, 1);
    EXPECT_LE(largest, 8);
  }
}

TEST(RandomFill, IndicesStayBelowTheirLimitAndOffsetsAscendToIt) {
  std::vector<int64_t> indices(1000);
  fill_random(indices.data(), DType::kInt64, 1000, {Content::kIndices, 37}, 3, nullptr);
  const auto [least, largest] = std::ranges::minmax(indices);
  EXPECT_EQ(least, 0);
  EXPECT_EQ(largest, 36);
  std::vector<int32_t> offsets(9);
  fill_random(offsets.data(), DType::kInt32, 9, {Content::kOffsets, 1000}, 3, nullptr);
  EXPECT_EQ(offsets.front(), 0);
  EXPECT_EQ(offsets.back(), 1000);
  EXPECT_TRUE(std::ranges::is_sorted(offsets));
}

TEST(Trial, RotatesPastTheLastLevelCacheWithinReason) {
  DeviceInfo device;
  device.cpu.l3_bytes = 48 << 20;
  device.memory_bytes = int64_t{8} << 30;
  EXPECT_EQ(rotation_count(1 << 20, device), 64);
  EXPECT_EQ(rotation_count(16 << 20, device), 10);
  EXPECT_EQ(rotation_count(int64_t{1} << 30, device), 1);
  EXPECT_EQ(rotation_count(0, device), 64);
}

class AnyOperationTest : public tuning::TemporaryStore {
 protected:
  ProblemRequest request_{{8, 64}, DType::kFloat32, {}, {}};
};

TEST_F(AnyOperationTest, VerifyFindsEveryWrongKernelAndNoOther) {
  EXPECT_TRUE(erase(toy::kGood).verify(request_).empty());
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    request_.dtype = dtype;
    const auto failures = erase(toy::kMixed).verify(request_);
    ASSERT_EQ(failures.size(), 3u);
    EXPECT_EQ(failures[0].find("toy_mixed/wrong: wrong result: output: "), 0u) << failures[0];
    EXPECT_NE(failures[1].find("throwing: toy: no such luck"), std::string::npos) << failures[1];
    EXPECT_NE(failures[2].find("1 of them were not written; worst at [7, 63]"), std::string::npos) << failures[2];
  }
}

TEST_F(AnyOperationTest, VerifyChosenTriesWhatACallWouldGetAndNothingElse) {
  EXPECT_TRUE(verify_chosen(*erase(toy::kGood).make(request_)).empty());
  const AnyOperation mixed = erase(toy::kMixed);
  const std::string chosen = mixed.explain(request_, "").chosen_kernel;
  const auto failures = verify_chosen(*mixed.make(request_));
  std::vector<std::string> expected;
  for (const std::string& failure : mixed.verify(request_)) {
    if (failure.find("toy_mixed/" + chosen) == 0) expected.push_back(failure);
  }
  EXPECT_EQ(failures, expected);
  ASSERT_EQ(failures.size(), 1u) << "the first of the toy's kernels, " << chosen << ", is wrong on purpose";
}

TEST_F(AnyOperationTest, VerifyTakesEmptyProblems) {
  request_.shape = {0, 64};
  EXPECT_TRUE(erase(toy::kGood).verify(request_).empty());
}

TEST_F(AnyOperationTest, TuneTakesTheFastestRightOne) {
  const tuning::TuneReport report = erase(toy::kMixed).tune(request_, {});
  ASSERT_EQ(report.rows.size(), 6u) << "the reference is not tried beside others";
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.rows[0].kernel, "aligned");
  EXPECT_EQ(report.rows[0].config, "wait=0");
  EXPECT_EQ(report.rows[1].kernel, "plain");
  EXPECT_EQ(report.rows[2].config, "wait=400");
  EXPECT_GT(report.rows[2].median_us, 390);
  for (size_t i = 3; i < 6; ++i) EXPECT_FALSE(report.rows[i].failure.empty());
  EXPECT_EQ(tuning::find_measured(report.key)->measurement.config, "wait=0");
}

// A first check uses 1024 rows of 256, the next one 4096: 3500 are checked whole, of 20000 the kernel is tried on 4096.
TEST_F(AnyOperationTest, TuneChecksAKernelForManyRowsOnAsFewAsItTakes) {
  request_.shape = {3500, 256};
  EXPECT_EQ(erase(toy::kMany).tune(request_, {}).rows.at(0).failure, "");
  request_.shape = {20000, 256};
  const std::string failure = erase(toy::kMany).tune(request_, {}).rows.at(0).failure;
  EXPECT_NE(failure.find("of 1048576 elements differ"), std::string::npos) << failure;
}

TEST_F(AnyOperationTest, TuneOfWhatNothingSupportsGivesTheReasons) {
  EXPECT_THROW(erase(toy::kNone).tune(request_, {}), Error);
}

TEST_F(AnyOperationTest, BenchTimesTheChosenKernelAgainstACopy) {
  request_.shape = {64, 1024};
  BenchReport report = erase(toy::kGood).bench(request_, false, 0.02);
  ASSERT_EQ(report.rows.size(), 1u);
  EXPECT_EQ(report.rows[0].kernel, "aligned");
  EXPECT_EQ(report.rows[0].config, "wait=400");
  EXPECT_EQ(report.cost.bytes, 2 * 64 * 1024 * 4);
  EXPECT_GT(report.copy_us, 0);
  EXPECT_NEAR(report.rows[0].roof_share, report.copy_us / report.rows[0].median_us, 1e-9);
  EXPECT_NEAR(report.rows[0].gigabytes_per_second * report.rows[0].median_us, report.cost.bytes / 1e3, 1);
  EXPECT_EQ(report.request.shape, request_.shape);
  request_.shape = {8, 64};  // so small that the wait of 400 us is all there is
  report = erase(toy::kGood).bench(request_, true, 0.01);
  ASSERT_EQ(report.rows.size(), 4u);
  EXPECT_EQ(report.rows[0].config, "wait=400") << "the chosen one is first";
  EXPECT_LT(report.rows[1].median_us, report.rows[0].median_us);
}

TEST_F(AnyOperationTest, ShapesAndNamesComeThrough) {
  const AnyOperation any = erase(toy::kGood);
  EXPECT_EQ(any.name, "toy_good");
  EXPECT_EQ(any.kernel_names, (std::vector<std::string>{"future", "aligned", "plain", "reference"}));
  EXPECT_EQ(any.shapes().size(), 1u);
  EXPECT_TRUE(any.device_code().empty());
  EXPECT_EQ(any.candidates(request_).size(), 4u);
}

std::string text_of(const ProblemRequest& request) {
  std::string text = shape_text(request.shape) + " " + std::string(name_of(request.dtype));
  for (const auto& [name, value] : request.options) text += " " + name + "=" + value;
  return text;
}

TEST(RequestTable, CombinesTypesShapesAndOptions) {
  std::vector<std::string> texts;
  for (const ProblemRequest& request : requests_of(R"(
      fp32 fp64: 2x1,3 7 a=0,1  # six
        b+c=-,wide; 4x5 d=$word
      bf16: 6)",
                                                   {{"word", "a, text; with = all"}})) {
    texts.push_back(text_of(request));
  }
  ASSERT_EQ(texts.size(), 12u + 12 + 2 + 1);
  EXPECT_EQ(texts[0], "[2, 1] fp32 a=0");
  EXPECT_EQ(texts[1], "[2, 3] fp32 a=0");
  EXPECT_EQ(texts[5], "[7] fp32 a=1");
  EXPECT_EQ(texts[6], "[2, 1] fp64 a=0");
  EXPECT_EQ(texts[12], "[2, 1] fp32");
  EXPECT_EQ(texts[15], "[2, 1] fp32 b=fp32 c=fp32");
  EXPECT_EQ(texts[21], "[2, 1] fp64 b=fp64 c=fp64");
  EXPECT_EQ(texts[25], "[4, 5] fp64 d=a, text; with = all");
  EXPECT_EQ(texts[26], "[6] bf16");
}

TEST(RequestTable, AMistakeIsAnError) {
  EXPECT_THROW(requests_of("fp32: 2xa"), Error);
  EXPECT_THROW(requests_of("fp31: 2"), Error);
  EXPECT_THROW(requests_of("fp32: 2 a=$missing"), Error);
}

}  // namespace
}  // namespace kernel_pytorch::registry
