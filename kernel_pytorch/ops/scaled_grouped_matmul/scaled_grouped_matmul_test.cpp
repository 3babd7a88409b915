// What shapes alone do not show of scaled grouped products: a group's scales are its own, rows in no group are zeros
// whatever memory held, bad arguments.
#include "kernel_pytorch/ops/scaled_grouped_matmul/scaled_grouped_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

constexpr uint8_t kOne = 0x38, kTwo = 0x40;  // e4m3

template <class T>
TensorView view_of(std::vector<T>& values, DType dtype, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), dtype, sizes);
}

struct Arrays {
  std::vector<uint8_t> a = std::vector<uint8_t>(4 * 3, kOne), b = std::vector<uint8_t>(2 * 2 * 3, kTwo);
  std::vector<float> scale_a = {1, 2, 3, 4}, scale_b = {10, 100}, output = std::vector<float>(4 * 2, NAN);
  std::vector<int32_t> ends = {1, 3};

  Product product() {
    return {.a = view_of(a, DType::kFloat8E4M3, {4, 3}),
            .b = view_of(b, DType::kFloat8E4M3, {2, 2, 3}),
            .scale_a = view_of(scale_a, DType::kFloat32, {4}),
            .scale_b = view_of(scale_b, DType::kFloat32, {2}),
            .offsets = view_of(ends, DType::kInt32, {2}),
            .output = view_of(output, DType::kFloat32, {4, 2})};
  }
};

TEST(ScaledGroupedMatmul, GroupsHaveScalesOfTheirOwnAndTheRestIsZeros) {
  for (const char* kernel : {"cpu", "reference"}) {
    OwnContext context;
    context->kernel_override = kernel;
    Arrays arrays;
    multiply(arrays.product(), context);
    const std::vector<float> expected = {60, 60, 1200, 1200, 1800, 1800, 0, 0};
    EXPECT_EQ(arrays.output, expected) << kernel;
    std::vector<int32_t> gather = {3, 0, 0, -1};
    Product product = arrays.product();
    product.gather = view_of(gather, DType::kInt32, {4});
    multiply(product, context);
    EXPECT_EQ(arrays.output, (std::vector<float>{240, 240, 600, 600, 600, 600, 0, 0})) << kernel;
  }
}

TEST(ScaledGroupedMatmul, BadArgumentsSayWhatToDo) {
  OwnContext context;
  Arrays arrays;
  const auto message = [&](auto change) {
    Product product = arrays.product();
    change(product);
    try {
      multiply(product, context);
    } catch (const Error& error) {
      return std::string(error.message());
    }
    return std::string();
  };
  std::vector<int32_t> wrong = {3, 1};
  EXPECT_EQ(message([](Product&) {}), "");
  EXPECT_NE(message([&](Product& p) { p.offsets.data = wrong.data(); }).find("offsets[1] is 1 after 3"),
            std::string::npos);
  EXPECT_NE(message([](Product& p) { p.a.dtype = DType::kInt8; }).find("quantize it first"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.scale_b.sizes[0] = 1, p.b.sizes[0] = 3; }).find("offsets"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.scale_a.sizes[0] = 3; }).find("scale_a has shape [3]"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.output.dtype = DType::kInt32; }).find("output is int32"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::scaled_grouped_matmul
