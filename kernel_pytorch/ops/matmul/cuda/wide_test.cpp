// Products of wide types on tensor cores: who takes what, and on a GPU (tools/emulate has one) values that trials of
// random numbers do not have: infinities, NaN, numbers at the end of fp32's range, sums of one sign.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};

Product request(std::vector<int64_t> shape, DType dtype, std::vector<std::pair<std::string, std::string>> words) {
  return registry::make_problem(
      kMultiply, {.shape = std::move(shape), .dtype = dtype, .device = kGpu, .options = std::move(words)});
}
std::string answer_of(const registry::Kernel<Product>& kernel, const Product& product) {
  DeviceInfo info;
  info.device = kGpu;
  info.cuda.compute_major = 8;
  const registry::Support support = kernel.supports(product, info);
  return support ? "yes" : std::string(support.reason());
}

TEST(MatmulWide, TakesItsTypeAndSaysWhyNot) {
  for (const char* order : {"nn", "nt", "tn", "tt"}) {
    for (const char* precision : {"full", "tf32"}) {
      const Product product = request({2, 20, 136, 264}, DType::kFloat32, {{"order", order}, {"precision", precision}});
      EXPECT_EQ(answer_of(kMmaFloat, product), "yes") << order;
    }
    EXPECT_EQ(answer_of(kMmaDouble, request({2, 7, 5, 3}, DType::kFloat64, {{"order", order}})), "yes") << order;
  }
  EXPECT_EQ(answer_of(kMmaDouble, request({1, 7, 9, 0}, DType::kFloat64, {{"row_sums", "1"}})), "yes");
  const auto says = [](const Product& product, const char* part) {
    return answer_of(kMmaFloat, product).find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(request({1, 8, 8, 8}, DType::kBFloat16, {}), "takes fp32"));
  EXPECT_TRUE(says(request({1, 8, 8, 8}, DType::kFloat32, {{"precision", "bf16"}}), "full and tf32"));
  EXPECT_TRUE(says(request({1, 8, 8, 7}, DType::kFloat32, {}), "16 bytes"));
  EXPECT_TRUE(says(request({1, 8, 8, 0}, DType::kFloat32, {}), "nothing"));
  EXPECT_EQ(answer_of(kMmaDouble, request({1, 8, 8, 8}, DType::kFloat32, {})), "takes fp64");
}

TEST(MatmulWide, HopperTakesLargeProductsOfFp32AndSaysWhyNot) {
  const auto answer = [](const Product& product) {
    DeviceInfo info;
    info.device = kGpu;
    info.cuda.compute_major = 9;
    const registry::Support support = kSm90Float.supports(product, info);
    return support ? "yes" : std::string(support.reason());
  };
  for (const char* order : {"nn", "nt", "tn", "tt"}) {
    EXPECT_EQ(answer(request({2, 200, 136, 1264}, DType::kFloat32, {{"order", order}})), "yes") << order;
    const Product small = request({1, 4, 8, 4}, DType::kFloat32, {{"order", order}, {"precision", "tf32"}});
    EXPECT_EQ(answer(small), "yes") << order;
  }
  EXPECT_NE(answer(request({1, 128, 128, 128}, DType::kFloat32, {})).find("so small"), std::string::npos);
  EXPECT_NE(answer(request({1, 512, 512, 511}, DType::kFloat32, {})).find("16 bytes"), std::string::npos);
  EXPECT_NE(answer(request({2, 512, 512, 512}, DType::kFloat32, {{"row_sums", "1"}})).find("one batch"),
            std::string::npos);
  EXPECT_EQ(answer_of(kSm90Float, request({1, 512, 512, 512}, DType::kFloat32, {})).find("yes"), std::string::npos);
}

// [n, n] by [n, n].
std::vector<float> multiplied(const std::vector<float>& a, const std::vector<float>& b, int64_t n,
                              const std::string& kernel, Precision precision = Precision::kFull) {
  const size_t bytes = a.size() * sizeof(float);
  registry::DeviceBuffer on_a(kGpu, bytes), on_b(kGpu, bytes), on_output(kGpu, bytes);
  OwnContext context(kGpu);
  on_a.copy_from_host(a.data(), context->stream);
  on_b.copy_from_host(b.data(), context->stream);
  const auto view = [&](const registry::DeviceBuffer& buffer) {
    return contiguous_view(buffer.data(), DType::kFloat32, {n, n}, kGpu);
  };
  context->kernel_override = kernel;
  multiply({.a = view(on_a), .b = view(on_b), .precision = precision, .output = view(on_output)}, context);
  std::vector<float> output(a.size());
  on_output.copy_to_host(output.data(), context->stream);
  return output;
}

class MatmulWideOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
    if (!jit::nvrtc_info().found) GTEST_SKIP() << jit::nvrtc_info().absence;
  }
};

// [size, size] by [size, size].
void expect_fp32_of_special_values(int64_t size, const std::string& kernel) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> a(static_cast<size_t>(size * size)), b(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = std::sin(static_cast<float>(i)) + 2.0f;  // no zeros
    b[i] = std::cos(static_cast<float>(i)) + 2.0f;
  }
  b[5 * size + 7] = 0.0f;
  a[0 * size + 5] = kInfinity;  // times 0 in column 7
  a[1 * size + 3] = -kInfinity;
  a[2 * size + 1] = std::bit_cast<float>(0x7f800001);  // a NaN by its last bit
  a[3 * size + 2] = FLT_MAX;                           // rounds to infinity in 11 bits
  for (int64_t j = 0; j < size; ++j) b[2 * size + j] = 0.25f;
  b[9 * size + 11] = kInfinity;
  b[10 * size + 12] = std::bit_cast<float>(0xffffffff);
  const std::vector<float> output = multiplied(a, b, size, kernel);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      double expected = 0;
      for (int64_t k = 0; k < size; ++k) expected += double(a[i * size + k]) * double(b[k * size + j]);
      const double actual = output[i * size + j];
      if (std::isfinite(expected)) {
        EXPECT_NEAR(actual, expected, 1e-6 * std::abs(expected)) << i << " " << j;
      } else {
        EXPECT_EQ(std::isnan(actual), std::isnan(expected)) << i << " " << j;
        if (!std::isnan(expected)) EXPECT_EQ(actual, expected) << i << " " << j;
      }
    }
  }
}

TEST_F(MatmulWideOnGpu, WhatIsNotFiniteIsAsInFp32) {
  expect_fp32_of_special_values(24, "cuda_mma_fp32");
}

// Sums of one sign, which operands of 11 bits miss by some 1e-4, and a depth that is no whole group of parts.
TEST_F(MatmulWideOnGpu, HopperIsRightToFp32sRounding) {
  const DeviceInfo& info = device_info(kGpu);
  if (const char* missing = feature_obstacle(info, CudaFeature::kWgmma)) GTEST_SKIP() << missing;
  constexpr int64_t kSize = 264;
  std::vector<float> a(static_cast<size_t>(kSize * kSize)), b(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = std::sin(static_cast<float>(i)) + 2.0f;
    b[i] = std::cos(static_cast<float>(i)) + 2.0f;
  }
  const std::vector<float> output = multiplied(a, b, kSize, "sm90_tf32");
  for (int64_t i = 0; i < kSize; i += 7) {
    for (int64_t j = 0; j < kSize; ++j) {
      double expected = 0;
      for (int64_t k = 0; k < kSize; ++k) expected += double(a[i * kSize + k]) * double(b[k * kSize + j]);
      EXPECT_NEAR(output[i * kSize + j], expected, 1e-6 * expected) << i << " " << j;
    }
  }
}

// Times the identity: what a number becomes in 11 bits.
TEST_F(MatmulWideOnGpu, Tf32RoundsToNearestAndKeepsTheEndsOfTheRange) {
  constexpr int64_t kSize = 24;
  constexpr uint32_t kWords[][2] = {{0x3f800fff, 0x3f800000}, {0x3f801000, 0x3f802000}, {0xbf803000, 0xbf804000},
                                    {0x3fffffff, 0x40000000}, {0x7f7fefff, 0x7f7fe000}, {0x7f7ff000, 0x7f7fe000},
                                    {0xff7fffff, 0xff7fe000}, {0x7f800000, 0x7f800000}, {0xff800000, 0xff800000}};
  const DeviceInfo& info = device_info(kGpu);
  std::vector<float> a(kSize * kSize, 0.0f), identity(a.size(), 0.0f);
  for (size_t i = 0; i < kSize; ++i) identity[i * kSize + i] = 1.0f;
  for (size_t i = 0; i < std::size(kWords); ++i) a[i * kSize + i] = std::bit_cast<float>(kWords[i][0]);
  a[20 * kSize + 20] = std::bit_cast<float>(0x7fffffff);  // a NaN, which a sum would turn into zero
  for (const registry::Kernel<Product>* kernel : {&kTile, &kMmaFloat, &kSm90Float}) {
    const Product asked = request({1, kSize, kSize, kSize}, DType::kFloat32, {{"precision", "tf32"}});
    if (!kernel->supports(asked, info)) continue;
    const std::vector<float> output = multiplied(a, identity, kSize, std::string(kernel->name), Precision::kTf32);
    for (size_t i = 0; i < std::size(kWords); ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(output[i * kSize + i]), kWords[i][1]) << kernel->name << " " << i;
    }
    EXPECT_TRUE(std::isnan(output[20 * kSize + 20])) << kernel->name;
  }
}

TEST_F(MatmulWideOnGpu, WhatIsNotFiniteIsAsInFp32OnHopper) {
  const DeviceInfo& info = device_info(kGpu);
  if (const char* missing = feature_obstacle(info, CudaFeature::kWgmma)) GTEST_SKIP() << missing;
  expect_fp32_of_special_values(256, "sm90_tf32");
}

}  // namespace
}  // namespace kernel_pytorch::matmul
