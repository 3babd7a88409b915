// What the shape lists of operations_test.cpp cannot say: strides, edges, in place and bad arguments, through the
// public entry; and who takes which problem on a GPU, which needs none.
#include "kernel_pytorch/ops/softmax/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/softmax/operation.h"

namespace kernel_pytorch::softmax {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Host memory with random contents behind a view.
struct Tensor {
  std::vector<char> memory;
  TensorView view;

  Tensor(DType dtype, std::vector<int64_t> sizes, int misalignment_elements = 0) {
    view = contiguous_view(nullptr, dtype, sizes);
    const int64_t elements = view.element_count() + misalignment_elements;
    memory.resize(static_cast<size_t>(elements * size_of(dtype)) + 64);
    char* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    view.data = aligned + misalignment_elements * size_of(dtype);
    std::mt19937 random(static_cast<unsigned>(elements));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < view.element_count(); ++i) store_element(view.data, dtype, i, normal(random));
  }
  float& operator[](int64_t index) const { return view.as<float>()[index]; }
};

TensorView transpose(TensorView view, int a, int b) {
  std::swap(view.sizes[a], view.sizes[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

double read(const TensorView& view, int64_t i, int64_t j, int64_t k) {
  return load_element(view.data, view.dtype, i * view.strides[0] + j * view.strides[1] + k * view.strides[2]);
}

// Compares with the formula, element by element, for a 3-D x and mask of any strides.
void expect_softmax_of(const TensorView& x, const TensorView& mask, bool causal, bool log) {
  const int64_t queries = x.sizes[1], columns = x.sizes[2];
  Tensor output(x.dtype, {x.sizes[0], queries, columns});
  OwnContext context;
  forward({.x = x, .mask = mask, .scale = 0.5, .causal = causal, .log = log, .output = output.view}, context);
  const double tolerance = x.dtype == DType::kFloat32 ? 2e-6 : 1e-2;
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    for (int64_t j = 0; j < queries; ++j) {
      std::vector<double> terms;
      double sum = 0;
      for (int64_t k = 0; k < columns; ++k) {
        double score = 0.5 * read(x, i, j, k);
        bool is_kept = !causal || k <= j + columns - queries;
        if (mask.is_present() && mask.dtype == DType::kBool) is_kept = is_kept && read(mask, i, j, k) != 0;
        if (mask.is_present() && mask.dtype != DType::kBool) score += read(mask, i, j, k);
        terms.push_back(is_kept ? std::exp(score) : 0);
        sum += terms.back();
      }
      for (int64_t k = 0; k < columns; ++k) {
        double expected = sum == 0 ? 0 : terms[k] / sum;
        if (log) expected = std::log(expected);
        const double actual = read(output.view, i, j, k);
        if (std::isinf(expected)) {
          ASSERT_EQ(actual, expected) << i << " " << j << " " << k;
        } else {
          ASSERT_NEAR(actual, expected, tolerance * (1 + std::abs(expected))) << i << " " << j << " " << k;
        }
      }
    }
  }
}

TEST(Softmax, AnyStridesAndMasks) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Tensor dense(dtype, {3, 5, 70}), added(dtype, {5, 70}), wide(DType::kFloat32, {3, 5, 70});
    const Tensor boolean(DType::kBool, {3, 70});
    for (int64_t i = 0; i < 210; ++i)
      boolean.view.as<uint8_t>()[i] = i % 3 != 0 && i >= 70;  // the first batch sees nothing
    TensorView by_query = contiguous_view(added.view.data, dtype, {3, 5, 70}), by_key = boolean.view;
    by_query.strides[0] = 0;
    by_key.rank = 3;
    by_key.sizes = {3, 5, 70};
    by_key.strides = {70, 0, 1};
    TensorView sliced = dense.view, expanded = dense.view;
    sliced.sizes[2] = 33;  // rows with a gap between them
    expanded.strides[0] = 0;
    for (bool log : {false, true}) {
      for (bool causal : {false, true}) {
        expect_softmax_of(dense.view, {}, causal, log);
        expect_softmax_of(dense.view, by_query, causal, log);
        expect_softmax_of(dense.view, by_key, causal, log);
        expect_softmax_of(dense.view, wide.view, causal, log);
        expect_softmax_of(sliced, {}, causal, log);
        expect_softmax_of(expanded, by_key, causal, log);
      }
      expect_softmax_of(transpose(dense.view, 0, 1), {}, false, log);  // leading dimensions that do not merge
      expect_softmax_of(transpose(dense.view, 1, 2), {}, true, log);   // columns that are not contiguous; more queries
      expect_softmax_of(Tensor(dtype, {3, 5, 71}, 1).view, {}, false, log);
    }
  }
}

TEST(Softmax, InPlace) {
  for (int64_t columns : {5, 64, 20000}) {
    Tensor x(DType::kFloat32, {3, columns}), separate(DType::kFloat32, {3, columns});
    OwnContext context;
    forward({.x = x.view, .output = separate.view}, context);
    forward({.x = x.view, .output = x.view}, context);
    for (int64_t i = 0; i < 3 * columns; ++i) ASSERT_EQ(x[i], separate[i]) << i;
    Tensor gradient(DType::kFloat32, {3, columns});
    backward({.grad_output = gradient.view, .output = x.view, .grad_input = separate.view}, context);
    backward({.grad_output = gradient.view, .output = x.view, .grad_input = gradient.view}, context);
    for (int64_t i = 0; i < 3 * columns; ++i) ASSERT_EQ(gradient[i], separate[i]) << i;
  }
}

TEST(Softmax, ExtremeScores) {
  Tensor x(DType::kFloat32, {5, 64}), output(DType::kFloat32, {5, 64});
  for (int j = 0; j < 64; ++j) {
    x[j] = j == 3 ? 1e4f : 1e4f - 1;  // large, close together
    x[64 + j] = j == 3 ? -3e38f : -kInfinity;
    x[128 + j] = -kInfinity;  // nothing at all, and no mask to say so
    if (j == 7) x[192 + j] = kNan;
    if (j == 7) x[256 + j] = kInfinity;
  }
  OwnContext context;
  forward({.x = x.view, .output = output.view}, context);
  EXPECT_NEAR(output[3], 1 / (1 + 63 * std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(output[4], std::exp(-1.0) / (1 + 63 * std::exp(-1.0)), 1e-7);
  EXPECT_EQ(output[64 + 3], 1.0f);
  EXPECT_EQ(output[64 + 4], 0.0f);
  for (int j = 0; j < 64; ++j) {
    for (int row : {2, 3, 4}) EXPECT_TRUE(std::isnan(output[row * 64 + j])) << row << " " << j;
  }
  forward({.x = x.view, .log = true, .output = output.view}, context);
  EXPECT_NEAR(output[3], -std::log(1 + 63 * std::exp(-1.0)), 1e-6);
  EXPECT_EQ(output[64 + 4], -kInfinity);
  for (int row : {2, 3, 4}) EXPECT_TRUE(std::isnan(output[row * 64])) << row;
}

TEST(Softmax, RemovedScoresHaveNoGradient) {
  Tensor x(DType::kFloat32, {2, 8}), output(DType::kFloat32, {2, 8}), gradient(DType::kFloat32, {2, 8});
  Tensor mask(DType::kBool, {2, 8}), grad_input(DType::kFloat32, {2, 8});
  for (int i = 0; i < 16; ++i) mask.view.as<uint8_t>()[i] = i < 4;
  OwnContext context;
  for (bool log : {false, true}) {
    forward({.x = x.view, .mask = mask.view, .log = log, .output = output.view}, context);
    backward({.grad_output = gradient.view,
              .output = output.view,
              .log = log,
              .masked = true,
              .grad_input = grad_input.view},
             context);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(grad_input[i] == 0, i >= 4) << log << " " << i;
  }
}

TEST(Softmax, EmptyInputs) {
  OwnContext context;
  for (auto sizes : {std::vector<int64_t>{0, 16}, {4, 0}, {0, 0}, {3, 0, 16}}) {
    Tensor x(DType::kFloat32, sizes), output(DType::kFloat32, sizes);
    forward({.x = x.view, .causal = true, .output = output.view}, context);
    backward({.grad_output = x.view, .output = x.view, .grad_input = output.view}, context);
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

TEST(Softmax, BadArgumentsSayWhatIsWrong) {
  Tensor x(DType::kFloat32, {4, 6}), other(DType::kFloat32, {6, 4}), half(DType::kBFloat16, {4, 6});
  Tensor row(DType::kFloat32, {6}), integers(DType::kInt64, {4, 6});
  const auto expect_in = [](const std::string& part, const std::string& text) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_in("softmax: x is missing", error_of({}));
  expect_in("log_softmax: output is missing", error_of({.x = x.view, .log = true}));
  expect_in("output has shape [6, 4], x has [4, 6]", error_of({.x = x.view, .output = other.view}));
  expect_in("mask has shape [6, 4], x has [4, 6]", error_of({.x = x.view, .mask = other.view, .output = x.view}));
  expect_in("mask is bf16, x is fp32", error_of({.x = x.view, .mask = half.view, .output = x.view}));
  expect_in("x is int64", error_of({.x = integers.view, .output = integers.view}));
  expect_in("scale is inf", error_of({.x = x.view, .scale = HUGE_VAL, .output = x.view}));
  expect_in("causal needs a dimension of queries", error_of({.x = row.view, .causal = true, .output = row.view}));
  expect_in("in place it must be contiguous",
            error_of({.x = transpose(other.view, 0, 1),
                      .output = contiguous_view(other.view.data, DType::kFloat32, {4, 6})}));
}

// Who takes a problem on a GPU.
std::string chosen_on(const DeviceInfo& device, DType dtype, int64_t columns, bool masked, int64_t misalignment = 0) {
  ForwardProblem problem;
  problem.x = problem.output =
      contiguous_view(reinterpret_cast<void*>(misalignment), dtype, {64, columns}, device.device);
  if (masked) problem.mask = contiguous_view(nullptr, DType::kBool, {64, columns}, device.device);
  for (const auto& kernel : kForward.kernels()) {
    if (!kernel.supports(problem, device)) continue;
    EXPECT_FALSE(kernel.configs(problem, device).empty());
    return std::string(kernel.name);
  }
  return "none";
}

TEST(Softmax, EveryWidthHasAKernelOnAGpu) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = 9;
  for (bool masked : {false, true}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (int64_t columns = 8; columns <= 262144; columns += columns < 8192 ? 8 : 1024) {
        const std::string kernel = chosen_on(device, dtype, columns, masked);
        const bool narrow = columns * size_of(dtype) <= (masked ? 2048 : 4096) * 16;
        EXPECT_EQ(kernel, narrow ? "cuda_rows" : "cuda_cluster") << dtype << " " << columns << " " << masked;
      }
      EXPECT_EQ(chosen_on(device, dtype, 127, masked), "cuda_any");
      EXPECT_EQ(chosen_on(device, dtype, 128, masked, 4), "cuda_any");
      EXPECT_EQ(chosen_on(device, dtype, 1 << 20, masked), "cuda_any");
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::softmax
