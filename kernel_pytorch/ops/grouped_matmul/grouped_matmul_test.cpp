// What shapes alone do not show of grouped products: a group's NaN stays its own, rows in no group are zeros whatever
// memory held, gathers of rows in no group are not read, bad arguments.
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
TensorView view_of(std::vector<int32_t>& values) {
  return contiguous_view(values.data(), DType::kInt32, {static_cast<int64_t>(values.size())});
}
std::vector<float> counting(size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

TEST(GroupedMatmul, GroupsAreApartAndTheRestIsZeros) {
  for (const char* kernel : {"cpu", "reference"}) {
    OwnContext context;
    context->kernel_override = kernel;
    std::vector<float> a = counting(5 * 2), b = counting(3 * 2 * 2), output(5 * 2, NAN);
    a[2] = NAN;  // of row 1, in group 0
    std::vector<int32_t> ends = {2, 2, 4};
    multiply({.a = view_of(a, {5, 2}),
              .b = view_of(b, {3, 2, 2}),
              .offsets = view_of(ends),
              .output = view_of(output, {5, 2})},
             context);
    EXPECT_EQ(output[0], 1 * 1 + 2 * 3);
    EXPECT_TRUE(std::isnan(output[2]) && std::isnan(output[3]));
    EXPECT_EQ(output[4], 5 * 9 + 6 * 11);  // row 2 by the third matrix
    EXPECT_EQ(output[8], 0) << kernel;
    EXPECT_EQ(output[9], 0) << kernel;
    std::vector<float> gradient(3 * 2 * 2, NAN);
    std::vector<float> other = counting(5 * 2);
    weight_gradient({.a = view_of(a, {5, 2}),
                     .b = view_of(other, {5, 2}),
                     .offsets = view_of(ends),
                     .output = view_of(gradient, {3, 2, 2})},
                    context);
    EXPECT_TRUE(std::isnan(gradient[0])) << kernel;
    for (int i = 4; i < 8; ++i) EXPECT_EQ(gradient[i], 0) << kernel;  // the empty group's
    EXPECT_EQ(gradient[8], 5 * 5 + 7 * 7) << kernel;
  }
}

TEST(GroupedMatmul, GathersOfRowsInNoGroupAreNotRead) {
  OwnContext context;
  std::vector<float> a = counting(2 * 2), b = counting(1 * 2 * 1), output(3, NAN);
  std::vector<int32_t> ends = {2}, gather = {1, 0, -1};
  multiply({.a = view_of(a, {2, 2}),
            .b = view_of(b, {1, 2, 1}),
            .offsets = view_of(ends),
            .gather = view_of(gather),
            .output = view_of(output, {3, 1})},
           context);
  EXPECT_EQ(output, (std::vector<float>{3 * 1 + 4 * 2, 1 * 1 + 2 * 2, 0}));
}

TEST(GroupedMatmul, BadArgumentsSayWhatToDo) {
  OwnContext context;
  std::vector<float> a(4 * 2), b(2 * 2 * 3), output(4 * 3);
  std::vector<int32_t> ends = {1, 4}, wrong = {3, 1}, far = {1, 5};
  const auto message = [&](auto change) {
    Product product{.a = view_of(a, {4, 2}),
                    .b = view_of(b, {2, 2, 3}),
                    .offsets = view_of(ends),
                    .output = view_of(output, {4, 3})};
    change(product);
    try {
      multiply(product, context);
    } catch (const Error& error) {
      return std::string(error.message());
    }
    return std::string();
  };
  EXPECT_EQ(message([](Product&) {}), "");
  EXPECT_NE(message([&](Product& p) { p.offsets = view_of(wrong); }).find("offsets"), std::string::npos);
  EXPECT_NE(message([&](Product& p) { p.offsets = view_of(far); }).find("offsets"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.form = Form::kGated; }).find("even number"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.limit = 1; }).find("limit is 1"), std::string::npos);
  EXPECT_NE(message([](Product& p) { p.b.sizes[1] = 1; }).find("b must be [groups, 2, n]"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::grouped_matmul
