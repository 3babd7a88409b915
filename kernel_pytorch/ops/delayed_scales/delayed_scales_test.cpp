// What the shape list cannot say: the steps of a history, one after another, and bad arguments.
#include "kernel_pytorch/ops/delayed_scales/delayed_scales.h"

#include <gtest/gtest.h>

#include <functional>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::delayed_scales {
namespace {

TEST(DelayedScales, ScalesFollowTheLargestOfTheHistory) {
  OwnContext context;
  for (const char* kernel : {"cpu", "reference"}) {
    context->kernel_override = kernel;
    std::vector<float> histories(3 * 2, 0), amax(2), scales(2), factors = {0.5f, 0x1p-120f};
    const Update update_of{.histories = contiguous_view(histories.data(), DType::kFloat32, {3, 2}),
                           .amax = {contiguous_view(amax.data(), DType::kFloat32, {2})},
                           .scales = {contiguous_view(scales.data(), DType::kFloat32, {2})},
                           .factors = contiguous_view(factors.data(), DType::kFloat32, {2})};
    const float seen[] = {8, 2, 4, 0, 0, 0, 0}, expected[] = {4, 4, 4, 2, 2, 1, 1};
    for (int step = 0; step < 7; ++step) {
      amax = {seen[step], step == 6 ? 0x1p-30f : 0};
      delayed_scales::update(update_of, context);
      EXPECT_EQ(scales[0], expected[step]) << kernel << " step " << step;
      EXPECT_EQ(scales[1], step == 6 ? 0x1p-126f : 1.0f) << kernel << " step " << step;
      EXPECT_EQ(amax[0], 0) << kernel;
      EXPECT_EQ(histories[4], seen[step]) << kernel;
    }
  }
}

TEST(DelayedScales, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> numbers(12, 1);
  const auto row = [&](int64_t count) { return contiguous_view(numbers.data(), DType::kFloat32, {count}); };
  const Update good{.histories = contiguous_view(numbers.data(), DType::kFloat32, {2, 6}),
                    .amax = {row(3), row(3)},
                    .scales = {row(3), row(3)},
                    .factors = row(6)};
  update(good, context);
  const auto expect = [&](const std::function<void(Update&)>& change, const char* words) {
    Update bad = good;
    change(bad);
    try {
      update(bad, context);
      ADD_FAILURE() << "no error with " << words;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  expect([](Update& call) { call.scales.pop_back(); }, "scales has 1 tensors, amax 2");
  expect([&](Update& call) { call.amax[1] = row(2); }, "amax[1] has 2 elements");
  const TensorView narrow = contiguous_view(numbers.data(), DType::kFloat32, {2, 5});
  expect([&](Update& call) { call.histories = narrow; }, "histories has shape");
  expect([&](Update& call) { call.factors = row(5); }, "factors has 5 elements");
  expect([&](Update& call) { call.joined = row(3); }, "joined has 3 elements");
  expect([](Update& call) { call.factors.dtype = DType::kInt32; }, "it must be contiguous fp32");
}

}  // namespace
}  // namespace kernel_pytorch::delayed_scales
