// What the shape lists of operations_test.cpp cannot say: the reference against finite differences, ignored rows,
// strides, in place, parts of a vocabulary, edges and bad arguments; and who takes which problem on a GPU.
#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"

namespace kernel_pytorch::cross_entropy {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Host memory with random contents behind a view.
struct Tensor {
  std::vector<char> memory;
  TensorView view;

  Tensor(DType dtype, std::vector<int64_t> sizes) : view(contiguous_view(nullptr, dtype, sizes)) {
    memory.resize(static_cast<size_t>(view.byte_count()) + 64);
    view.data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    std::mt19937 random(static_cast<unsigned>(view.element_count()));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < view.element_count(); ++i) store_element(view.data, dtype, i, normal(random));
  }
  Tensor(std::vector<int64_t> targets) : Tensor(DType::kInt64, {static_cast<int64_t>(targets.size())}) {
    for (size_t i = 0; i < targets.size(); ++i) view.as<int64_t>()[i] = targets[i];
  }
  double operator[](int64_t index) const { return load_element(view.data, view.dtype, index); }
  void set(int64_t index, double value) const { store_element(view.data, view.dtype, index, value); }
};

const Options kEverything{.ignore_index = 2, .label_smoothing = 0.2, .z_loss = 0.05, .softcap = 1.5};

TEST(CrossEntropy, GradientIsTheDerivativeOfTheTotal) {
  OwnContext context;
  const Tensor target({0, 2, 4, 3}), weight(DType::kFloat64, {5});
  for (int64_t j = 0; j < 5; ++j) weight.set(j, 0.5 + 0.25 * static_cast<double>(j));
  for (const Options& options : {Options{}, kEverything}) {
    for (Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
      const Tensor logits(DType::kFloat64, {4, 5}), gradient(DType::kFloat64, {4, 5}), unused(DType::kFloat64, {4});
      const auto total_of = [&](TensorView grad_logits) {
        const Tensor loss(DType::kFloat64, {4}), total(DType::kFloat64, {1});
        forward({.logits = logits.view,
                 .target = target.view,
                 .weight = weight.view,
                 .options = options,
                 .reduction = reduction,
                 .gradient_scale = 3,
                 .loss = loss.view,
                 .total = total.view,
                 .grad_logits = grad_logits},
                context);
        return total[0];
      };
      total_of(gradient.view);
      for (int64_t i = 0; i < 20; ++i) {
        const double before = logits[i], step = 1e-5;
        logits.set(i, before + step);
        const double above = total_of({});
        logits.set(i, before - step);
        const double below = total_of({});
        logits.set(i, before);
        EXPECT_NEAR(gradient[i], 3 * (above - below) / (2 * step), 1e-8) << i;
      }
    }
  }
}

TEST(CrossEntropy, IgnoredRowsCountForNothing) {
  OwnContext context;
  const Tensor logits(DType::kFloat32, {3, 70}), loss(DType::kFloat32, {3}), lse(DType::kFloat32, {3});
  const Tensor total(DType::kFloat32, {1}), gradient(DType::kFloat32, {3, 70});
  for (int64_t j = 0; j < 70; ++j) logits.set(70 + j, std::nan(""));  // an ignored row is not read
  const auto run = [&](const Tensor& target) {
    forward({.logits = logits.view,
             .target = target.view,
             .loss = loss.view,
             .lse = lse.view,
             .total = total.view,
             .grad_logits = gradient.view},
            context);
  };
  run(Tensor({1, -100, 69}));
  EXPECT_FLOAT_EQ(total[0], (loss[0] + loss[2]) / 2);
  EXPECT_EQ(loss[1], 0);
  EXPECT_EQ(lse[1], 0);
  for (int64_t j = 0; j < 70; ++j) EXPECT_EQ(gradient[70 + j], 0) << j;
  EXPECT_NE(gradient[140], 0);
  run(Tensor({-100, -100, -100}));
  EXPECT_TRUE(std::isnan(total[0]));  // 0 / 0, as torch
  for (int64_t i = 0; i < 210; ++i) EXPECT_EQ(gradient[i], 0) << i;
}

TEST(CrossEntropy, TargetsOf32BitsAreThoseOf64) {
  OwnContext context;
  const Tensor wide({4, -100, 9, 0}), narrow(DType::kInt32, {4});
  for (int64_t i = 0; i < 4; ++i) narrow.set(i, static_cast<double>(wide.view.as<int64_t>()[i]));
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {  // the last is the reference's
    const DType sums = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    const Tensor logits(dtype, {4, 10}), weight(dtype, {10});
    std::vector<double> values[2];
    for (const Tensor* target : {&wide, &narrow}) {
      const Tensor loss(sums, {4}), lse(sums, {4}), total(sums, {1}), gradient(dtype, {4, 10});
      forward({.logits = logits.view,
               .target = target->view,
               .weight = weight.view,
               .loss = loss.view,
               .lse = lse.view,
               .total = total.view,
               .grad_logits = gradient.view},
              context);
      for (int64_t i = 0; i < 40; ++i) values[target == &narrow].push_back(gradient[i]);
      values[target == &narrow].push_back(total[0]);
    }
    EXPECT_EQ(values[0], values[1]) << dtype;
  }
}

TEST(CrossEntropy, StridesAndInPlace) {
  OwnContext context;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Tensor dense(dtype, {6, 40}), target({5, 0, 19, 7, 7, 1}), loss(DType::kFloat32, {6});
    const auto check = [&](const TensorView& view) {
      const Tensor copy(dtype, {6, 20}), from_copy(dtype, {6, 20}), gradient(dtype, {6, 20}),
          expected(DType::kFloat32, {6});
      for (int64_t i = 0; i < 120; ++i) {
        const int64_t offset = i / 20 % view.sizes[0] * view.strides[0] + i % 20 * view.strides[1];
        copy.set(i, load_element(view.data, dtype, offset));
      }
      forward({.logits = copy.view, .target = target.view, .loss = expected.view, .grad_logits = from_copy.view},
              context);
      forward({.logits = view, .target = target.view, .loss = loss.view, .grad_logits = gradient.view}, context);
      forward({.logits = copy.view, .target = target.view, .loss = loss.view, .grad_logits = copy.view}, context);
      const double tolerance = dtype == DType::kFloat32 ? 1e-6 : 1e-3;
      for (int64_t i = 0; i < 6; ++i) EXPECT_NEAR(loss[i], expected[i], 1e-5);
      for (int64_t i = 0; i < 120; ++i) {
        EXPECT_NEAR(gradient[i], from_copy[i], tolerance) << i;
        EXPECT_EQ(copy[i], from_copy[i]) << i;
      }
    };
    TensorView sliced = dense.view, expanded = dense.view,
               transposed = contiguous_view(dense.view.data, dtype, {20, 6});
    sliced.sizes[1] = expanded.sizes[1] = 20;
    expanded.strides[0] = 0;
    std::swap(transposed.sizes[0], transposed.sizes[1]);
    std::swap(transposed.strides[0], transposed.strides[1]);
    check(sliced);
    check(expanded);
    check(transposed);
  }
}

TEST(CrossEntropy, PartsOfAVocabularyGiveTheWhole) {
  OwnContext context;
  constexpr int64_t kRows = 5, kParts = 3, kColumns = 24;
  Options options{.ignore_index = 4, .label_smoothing = 0.1, .z_loss = 0.01, .softcap = 4};
  const Tensor logits(DType::kFloat32, {kRows, kParts * kColumns}), target({3, 30, 71, 24, 4});
  const Tensor loss(DType::kFloat32, {kRows}), lse(DType::kFloat32, {kRows}), whole(DType::kFloat32, {kRows, 72});
  forward({.logits = logits.view,
           .target = target.view,
           .options = options,
           .reduction = Reduction::kNone,
           .loss = loss.view,
           .lse = lse.view,
           .grad_logits = whole.view},
          context);
  std::vector<double> largest(kRows, -kInfinity), own(kRows), sum(kRows), z_sum(kRows);
  const Tensor ones(DType::kFloat32, {1});
  ones.set(0, 1);
  for (int64_t part = 0; part < kParts; ++part) {
    TensorView slice = logits.view;
    slice.data = logits.view.as<float>() + part * kColumns;
    slice.sizes[1] = kColumns;
    options.vocabulary = kParts * kColumns;
    options.first_column = part * kColumns;
    const Tensor partials(DType::kFloat32, {kRows, 4}), gradient(DType::kFloat32, {kRows, kColumns});
    forward({.logits = slice, .target = target.view, .options = options, .partials = partials.view}, context);
    backward({.logits = slice,
              .target = target.view,
              .options = options,
              .lse = lse.view,
              .grad_loss = ones.view,
              .grad_logits = gradient.view},
             context);
    for (int64_t row = 0; row < kRows; ++row) {
      const double more = partials[4 * row], together = std::max(largest[row], more);
      if (together == -kInfinity) continue;
      sum[row] = sum[row] * std::exp(largest[row] - together) + partials[4 * row + 1] * std::exp(more - together);
      largest[row] = together;
      own[row] += partials[4 * row + 2];
      z_sum[row] += partials[4 * row + 3];
      for (int64_t j = 0; j < kColumns; ++j) {
        EXPECT_NEAR(gradient[row * kColumns + j], whole[row * 72 + part * kColumns + j], 1e-6) << part << row << j;
      }
    }
  }
  for (int64_t row = 0; row + 1 < kRows; ++row) {
    const double together = largest[row] + std::log(sum[row]);
    EXPECT_NEAR(lse[row], together, 1e-6);
    EXPECT_NEAR(loss[row],
                0.9 * (together - own[row]) + 0.1 / 72 * (72 * together - z_sum[row]) + 0.01 * together * together,
                2e-6);
  }
}

TEST(CrossEntropy, ExtremeLogits) {
  OwnContext context;
  const Tensor logits(DType::kFloat32, {4, 64}), loss(DType::kFloat32, {4}), gradient(DType::kFloat32, {4, 64});
  for (int64_t j = 0; j < 64; ++j) {
    logits.set(j, j == 3 ? 1e4 : 1e4 - 8);
    logits.set(64 + j, j < 2 ? j : -kInfinity);
    logits.set(128 + j, j < 2 ? j : -kInfinity);
  }
  logits.set(192 + 9, std::nan(""));
  const Tensor target({3, 1, 63, 0});
  forward({.logits = logits.view,
           .target = target.view,
           .reduction = Reduction::kNone,
           .loss = loss.view,
           .grad_logits = gradient.view},
          context);
  EXPECT_NEAR(loss[0], std::log1p(63 * std::exp(-8.0)), 1e-6);  // not lost beside 1e4
  EXPECT_NEAR(loss[1], std::log1p(std::exp(-1.0)), 1e-6);
  EXPECT_EQ(gradient[64 + 5], 0);
  EXPECT_EQ(loss[2], kInfinity);
  EXPECT_TRUE(std::isnan(loss[3]) && std::isnan(gradient[192]));
}

TEST(CrossEntropy, RescaleMultiplies) {
  OwnContext context;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const Tensor tensor(dtype, {1000}), before(dtype, {1000});
    const Tensor scale(dtype == DType::kFloat64 ? dtype : DType::kFloat32, {1});
    scale.set(0, 1);
    rescale({.tensor = tensor.view, .scale = scale.view}, context);
    for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(tensor[i], before[i]) << i;
    scale.set(0, 4);
    rescale({.tensor = tensor.view, .scale = scale.view}, context);
    for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(tensor[i], 4 * before[i]) << i;
  }
}

std::string error_of(const Forward& arguments) {
  OwnContext context;
  try {
    forward(arguments, context);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CrossEntropy, BadArgumentsSayWhatIsWrong) {
  const Tensor logits(DType::kFloat32, {2, 6}), target({1, 5}), loss(DType::kFloat32, {2}), bad({1, 6});
  const Tensor floats(DType::kFloat32, {2}), three({0, 0, 0}), partials(DType::kFloat32, {2, 4});
  const auto expect_in = [](const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  Forward good{.logits = logits.view, .target = target.view, .loss = loss.view};
  EXPECT_EQ(error_of(good), "no error");
  const auto error_with = [&](const auto& change) {
    Forward changed = good;
    change(changed);
    return error_of(changed);
  };
  expect_in("target 6 of row 1 is not in [0, 6)", error_with([&](Forward& f) { f.target = bad.view; }));
  expect_in("target is fp32", error_with([&](Forward& f) { f.target = floats.view; }));
  expect_in("target has shape [3]", error_with([&](Forward& f) { f.target = three.view; }));
  expect_in("weight has shape [2], there are 6 classes", error_with([&](Forward& f) { f.weight = floats.view; }));
  expect_in("label_smoothing is 1.5", error_with([&](Forward& f) { f.options.label_smoothing = 1.5; }));
  expect_in("softcap is -1", error_with([&](Forward& f) { f.options.softcap = -1; }));
  expect_in("z_loss is nan", error_with([&](Forward& f) { f.options.z_loss = std::nan(""); }));
  expect_in("not within the vocabulary of 7", error_with([&](Forward& f) {
              f.options.vocabulary = 7;
              f.options.first_column = 3;
            }));
  expect_in("ask for them alone", error_with([&](Forward& f) { f.partials = partials.view; }));
  expect_in("total is asked for with reduction none", error_with([&](Forward& f) {
              f.reduction = Reduction::kNone;
              f.total = loss.view;
            }));
  expect_in("at least one class", error_with([&](Forward& f) {
              f.logits = contiguous_view(nullptr, DType::kFloat32, {2, 0});
            }));
}

TEST(CrossEntropy, WidthAndOptionsDecideTheKernelOnAGpu) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = 9;
  device.cuda.multiprocessors = 132;
  device.cuda.shared_bytes_per_block = 232448;
  device.cuda.shared_bytes_per_multiprocessor = 233472;
  const auto chosen = [&](DType dtype, int64_t columns, double softcap) -> std::string {
    Problem problem;
    problem.logits = problem.grad_logits = contiguous_view(nullptr, dtype, {64, columns}, device.device);
    problem.options.softcap = softcap;
    for (const auto& kernel : kForward.kernels()) {
      if (!kernel.supports(problem, device)) continue;
      const auto configs = kernel.configs(problem, device);
      const int config = kernel.heuristic == nullptr ? 0 : kernel.heuristic(problem, device);
      EXPECT_LT(config, static_cast<int>(configs.size()));
      return std::string(kernel.name);
    }
    return "none";
  };
  EXPECT_EQ(chosen(DType::kBFloat16, 4096, 0), "cuda_block");
  EXPECT_EQ(chosen(DType::kBFloat16, 32000, 0), "cuda_cluster");
  EXPECT_EQ(chosen(DType::kBFloat16, 50304, 0), "cuda_cluster");
  EXPECT_EQ(chosen(DType::kFloat32, 16384, 0), "cuda_cluster");
  EXPECT_EQ(chosen(DType::kBFloat16, 32000, 30), "cuda_block");
  EXPECT_EQ(chosen(DType::kBFloat16, 50257, 0), "cuda_block");  // rows begin anywhere
  for (int64_t columns : {128256, 151936, 262144}) {
    EXPECT_EQ(chosen(DType::kBFloat16, columns, 0), "cuda_block") << columns;
    EXPECT_EQ(chosen(DType::kFloat32, columns, 0), "cuda_block") << columns;
  }
}

}  // namespace
}  // namespace kernel_pytorch::cross_entropy
