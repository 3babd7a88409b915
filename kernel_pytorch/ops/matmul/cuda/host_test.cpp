// Which products the kernels of CUDA take and why they pass on others, said without a GPU. Values are compared on one
// by `kpt verify` and by the tests that walk every op's shapes.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::matmul {
namespace {

using Options = std::vector<std::pair<std::string, std::string>>;

DeviceInfo gpu(int major) {
  DeviceInfo info;
  info.device = {DeviceKind::kCuda, 0};
  info.cuda.compute_major = major;
  info.cuda.multiprocessors = 132;
  return info;
}

Product problem(std::vector<int64_t> shape, Options words, DType dtype = DType::kBFloat16) {
  return registry::make_problem(
      kMultiply,
      {.shape = std::move(shape), .dtype = dtype, .device = {DeviceKind::kCuda, 0}, .options = std::move(words)});
}

std::string answer(const registry::Kernel<Product>& kernel, const Product& product, int major = 9) {
  const registry::Support support = kernel.supports(product, gpu(major));
  return support ? "yes" : std::string(support.reason());
}

TEST(MatmulCuda, Sm90TakesAligned16BitTypesInEveryOrderAndForm) {
  for (const char* order : {"nn", "nt", "tn", "tt"}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      EXPECT_EQ(answer(kSm90, problem({2, 200, 136, 264}, {{"order", order}}, dtype)), "yes") << order;
    }
  }
  for (const char* form : {"plain", "gated", "gradient", "gated_gradient"}) {
    EXPECT_EQ(answer(kSm90, problem({1, 64, 64, 64}, {{"form", form}, {"activation", "silu"}})), "yes") << form;
  }
  EXPECT_EQ(answer(kSm90, problem({1, 64, 64, 64}, {{"row_sums", "1"}, {"output", "fp32"}})), "yes");
  EXPECT_EQ(answer(kSm90, problem({3, 40, 72, 56}, {{"expand_b", "1"}})), "yes");
}

TEST(MatmulCuda, Sm90SaysWhyNot) {
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(answer(kSm90, problem({1, 64, 64, 64}, {}), 10), "compute capability 9.0"));
  EXPECT_TRUE(has(answer(kSm90, problem({1, 64, 64, 64}, {}, DType::kFloat32)), "bf16 and fp16"));
  EXPECT_TRUE(has(answer(kSm90, problem({1, 64, 64, 0}, {})), "nothing"));
  EXPECT_TRUE(has(answer(kSm90, problem({1, 64, 64, 63}, {})), "16 bytes"));
  EXPECT_TRUE(has(answer(kSm90, problem({1, 64, 63, 64}, {{"order", "nt"}})), "16 bytes"));
}

TEST(MatmulCuda, MmaTakesAligned16BitTypesOnEveryGpuWithTensorCores) {
  for (const int major : {8, 9, 10}) {
    for (const char* order : {"nn", "nt", "tn", "tt"}) {
      EXPECT_EQ(answer(kMma, problem({2, 200, 136, 264}, {{"order", order}}), major), "yes") << order;
    }
    EXPECT_EQ(answer(kMma, problem({1, 67, 131, 64}, {{"order", "nt"}, {"row_sums", "1"}}), major), "yes");
  }
  EXPECT_NE(answer(kMma, problem({1, 64, 64, 64}, {}, DType::kFloat32), 8), "yes");
  EXPECT_NE(answer(kMma, problem({1, 64, 64, 63}, {}), 8), "yes");
  EXPECT_NE(answer(kMma, problem({1, 64, 64, 0}, {}), 8), "yes");
}

TEST(MatmulCuda, ThinTakesFewRowsOfAnyFormAndSaysWhyNot) {
  for (const int64_t m : {1, 8, 9, 16}) {
    EXPECT_EQ(answer(kThin, problem({1, m, 331, 520}, {{"order", "nt"}}), 8), "yes") << m;
    EXPECT_EQ(answer(kThin, problem({2, m, 70, 40}, {{"order", "nt"}, {"form", "gated"}, {"activation", "silu"}})),
              "yes");
  }
  const auto says = [](const Product& product, const char* part) {
    return answer(kThin, product).find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(problem({1, 17, 64, 64}, {{"order", "nt"}}), "1 to 16 rows"));
  EXPECT_TRUE(says(problem({1, 4, 64, 64}, {{"order", "nn"}}), "along k"));
  EXPECT_TRUE(says(problem({1, 4, 64, 60}, {{"order", "nt"}, {"padding", "4"}}), "multiple of 8"));
  EXPECT_TRUE(says(problem({1, 4, 64, 64}, {{"order", "nt"}, {"row_sums", "1"}}), "sums no rows"));
  EXPECT_TRUE(says(problem({1, 4, 64, 64}, {{"order", "nt"}}, DType::kFloat32), "bf16 and fp16"));
}

// Every config that the heuristic may name exists.
TEST(MatmulCuda, ThinChoosesAConfigForEverySize) {
  for (const int64_t n : {8, 1024, 8192, 151936}) {
    for (const int64_t k : {8, 512, 1024, 2048, 14336}) {
      const Product product = problem({1, 3, n, k}, {{"order", "nt"}});
      const int config = kThin.heuristic(product, gpu(9));
      EXPECT_GE(config, 0);
      EXPECT_LT(config, static_cast<int>(kThin.configs(product, gpu(9)).size())) << n << " " << k;
    }
  }
}

TEST(MatmulCuda, TheVendorsIsNamedAsSuchAndComesAfterOurs) {
  const auto kernels = kMultiply.kernels();
  const auto place = [&](std::string_view name) {
    return std::ranges::find(kernels, name, &registry::Kernel<Product>::name) - kernels.begin();
  };
  EXPECT_EQ(kCublasLt.origin, registry::Origin::kVendor);
  EXPECT_GT(place("cublaslt"), place("cuda_tile"));
  const auto says = [](const Product& product, const char* part, int major = 9) {
    return answer(kCublasLt, product, major).find(part) != std::string::npos;
  };
  const std::string plain = answer(kCublasLt, problem({2, 200, 136, 264}, {{"bias", "1"}, {"residual", "1"}}));
  EXPECT_TRUE(plain == "yes" || plain.find("libcublasLt") != std::string::npos) << plain;
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {{"activation", "gelu"}}), "relu"));
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {{"form", "gated"}, {"activation", "silu"}}), "plain"));
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {{"activation", "relu"}, {"residual", "1"}}), "no activation then"));
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {{"bias", "fp32"}}), "bias"));
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {{"precision", "tf32"}}, DType::kFloat32), "as it is"));
  EXPECT_TRUE(says(problem({1, 64, 64, 0}, {}), "nothing"));
  EXPECT_TRUE(says(problem({1, 64, 64, 64}, {}), "8.0", 7));
}

TEST(MatmulCuda, TilesTakeEverything) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(answer(kTile, problem({1, 67, 130, 37}, {{"order", "tt"}, {"row_sums", "1"}}, dtype), 8), "yes");
    EXPECT_EQ(answer(kTile, problem({1, 7, 9, 0}, {}, dtype), 8), "yes");
  }
  EXPECT_EQ(answer(kTile, problem({1, 8, 8, 8}, {{"precision", "tf32"}}, DType::kFloat32), 8), "yes");
}

}  // namespace
}  // namespace kernel_pytorch::matmul
