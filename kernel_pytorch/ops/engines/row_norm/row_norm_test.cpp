// What the shape lists of operations_test.cpp cannot say: strides, edges and bad arguments, through the public entries
// of rms_norm and layer_norm.
#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/ops/layer_norm/layer_norm.h"
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

namespace kernel_pytorch::row_norm {
namespace {

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
};

TensorView transpose(TensorView view, int a, int b) {
  std::swap(view.sizes[a], view.sizes[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

double read(const TensorView& view, std::vector<int64_t> index) {
  int64_t offset = 0;
  for (size_t i = 0; i < index.size(); ++i) offset += index[i] * view.strides[i];
  return load_element(view.data, view.dtype, offset);
}

// Compares an rms_norm output with the formula, element by element, for a 3-D x of any strides.
void expect_rms_norm_of(const TensorView& x, DType dtype) {
  Tensor output(dtype, {x.sizes[0], x.sizes[1], x.sizes[2]}), weight(dtype, {x.sizes[2]});
  OwnContext context;
  rms_norm::forward(
      {.x = x, .residual = {}, .weight = weight.view, .eps = 1e-6, .output = output.view, .sum = {}, .rstd = {}},
      context);
  const double tolerance = dtype == DType::kFloat32 ? 1e-5 : 1e-2;
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    for (int64_t j = 0; j < x.sizes[1]; ++j) {
      double squares = 0;
      for (int64_t k = 0; k < x.sizes[2]; ++k) squares += read(x, {i, j, k}) * read(x, {i, j, k});
      const double rstd = 1 / std::sqrt(squares / static_cast<double>(x.sizes[2]) + 1e-6);
      for (int64_t k = 0; k < x.sizes[2]; ++k) {
        const double expected = read(x, {i, j, k}) * rstd * read(weight.view, {k});
        ASSERT_NEAR(read(output.view, {i, j, k}), expected, tolerance * (1 + std::abs(expected)))
            << i << " " << j << " " << k;
      }
    }
  }
}

TEST(RowNorm, AnyStrides) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Tensor dense(dtype, {3, 5, 70});
    expect_rms_norm_of(dense.view, dtype);
    expect_rms_norm_of(transpose(dense.view, 0, 1), dtype);  // leading dimensions that do not merge
    expect_rms_norm_of(transpose(dense.view, 1, 2), dtype);  // columns that are not contiguous
    TensorView sliced = dense.view;
    sliced.sizes[2] = 33;  // rows with a gap between them
    expect_rms_norm_of(sliced, dtype);
    TensorView expanded = dense.view;
    expanded.strides[0] = 0;
    expect_rms_norm_of(expanded, dtype);
    TensorView expanded_columns = dense.view;
    expanded_columns.strides[2] = 0;
    expect_rms_norm_of(expanded_columns, dtype);
    expect_rms_norm_of(Tensor(dtype, {3, 5, 71}, 1).view, dtype);  // misaligned
  }
}

TEST(RowNorm, MergesLeadingDimensions) {
  Tensor dense(DType::kFloat32, {2, 3, 1, 4, 8});
  TensorView view = dense.view;
  TensorView* views[] = {&view};
  merge_leading_dimensions(views);
  EXPECT_EQ(to_string(view), "fp32[24, 8] on cpu");
  TensorView swapped = transpose(dense.view, 0, 1);
  TensorView* swapped_views[] = {&swapped};
  merge_leading_dimensions(swapped_views);
  EXPECT_EQ(swapped.rank, 4);  // 3, 2, 4 rows and the columns; the single one is gone
  EXPECT_EQ(row_offset(swapped, 5), 96 * 0 + 32 * 0 + 96 + 8);
  Tensor lone(DType::kFloat32, {8});
  TensorView* lone_views[] = {&lone.view};
  merge_leading_dimensions(lone_views);
  EXPECT_EQ(to_string(lone.view), "fp32[1, 8] on cpu");
}

TEST(RowNorm, NanAndInfinityStayInTheirRows) {
  Tensor x(DType::kFloat32, {3, 100}), output(DType::kFloat32, {3, 100});
  x.view.as<float>()[5] = std::numeric_limits<float>::quiet_NaN();
  x.view.as<float>()[107] = std::numeric_limits<float>::infinity();
  OwnContext context;
  layer_norm::Forward arguments{.x = x.view, .output = output.view};
  layer_norm::forward(arguments, context);
  for (int j = 0; j < 100; ++j) {
    EXPECT_TRUE(std::isnan(output.view.as<float>()[j]));
    EXPECT_TRUE(std::isnan(output.view.as<float>()[100 + j]));
    EXPECT_TRUE(std::isfinite(output.view.as<float>()[200 + j]));
  }
}

TEST(RowNorm, LargeMeanLosesNoPrecision) {
  Tensor x(DType::kFloat32, {2, 4096}), output(DType::kFloat32, {2, 4096});
  for (int j = 0; j < 8192; ++j) x.view.as<float>()[j] = 4096.0f + static_cast<float>(j % 2);
  OwnContext context;
  layer_norm::Forward arguments{.x = x.view, .eps = 0, .output = output.view};
  layer_norm::forward(arguments, context);
  for (int j = 0; j < 8192; ++j) ASSERT_NEAR(output.view.as<float>()[j], j % 2 == 0 ? -1 : 1, 1e-5);
}

void fill(const Tensor& tensor, double value) {
  for (int64_t i = 0; i < tensor.view.element_count(); ++i) {
    store_element(tensor.view.data, tensor.view.dtype, i, value);
  }
}

// The mean of equal values is that value, exactly: an error of its last bit, times rstd, would be the output.
TEST(RowNorm, ConstantRowsGiveZeros) {
  OwnContext context;
  for (const std::string kernel : {"cpu", "reference"}) {
    context->kernel_override = kernel;
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      const DType wide = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
      for (const int64_t columns : {1, 2, 3, 7, 8, 15, 17, 33, 100, 768, 1000, 4096, 5003, 65537, 1 << 20}) {
        if (columns > (kernel == "reference" ? 5003 : unless_emulated(1 << 20, 65537))) continue;
        Tensor x(dtype, {2, columns}), output(dtype, {2, columns}), mean(wide, {2}), rstd(wide, {2});
        for (const double value : {0.1, -3.3, 33.3, 100.1, 1000.3, 12345.678, -60001.0, 1e30, -3e38}) {
          if (dtype == DType::kFloat16 && std::abs(value) > 65504) continue;
          fill(x, value);
          fill(output, 7);
          layer_norm::Forward arguments{.x = x.view, .eps = 1e-5, .output = output.view};
          arguments.mean = mean.view, arguments.rstd = rstd.view;
          layer_norm::forward(arguments, context);
          for (int64_t i = 0; i < 2 * columns; ++i) {
            ASSERT_EQ(load_element(output.view.data, dtype, i), 0)
                << kernel << " " << dtype << " " << columns << " of " << value;
          }
          EXPECT_EQ(load_element(mean.view.data, wide, 1), load_element(x.view.data, dtype, 0));
          EXPECT_NEAR(load_element(rstd.view.data, wide, 1), 1 / std::sqrt(*arguments.eps), 1e-3);
        }
      }
    }
  }
}

// The CPU kernel takes its squares around the mean of the row's first values where results have 16 bits.
TEST(RowNorm, AnOutlierAtTheRowsStartCostsNoPrecision) {
  for (const float first : {3.0f, 1000.0f, -60000.0f}) {
    Tensor x(DType::kFloat16, {1, 4099}), output(DType::kFloat16, {1, 4099});
    std::vector<float> values(4099);
    double sum = 0, squares = 0;
    for (size_t j = 0; j < values.size(); ++j) {
      const Float16 rounded = from_float<Float16>(j == 0 ? first : 7.0f + std::sin(static_cast<float>(j)));
      x.view.as<Float16>()[j] = rounded;
      values[j] = to_float(rounded);
      sum += values[j];
    }
    const double mean = sum / 4099;
    for (const float value : values) squares += (value - mean) * (value - mean);
    const double rstd = 1 / std::sqrt(squares / 4099);
    OwnContext context;
    layer_norm::forward({.x = x.view, .eps = 0, .output = output.view}, context);
    for (size_t j = 0; j < values.size(); ++j) {
      const double wanted = (values[j] - mean) * rstd;
      ASSERT_NEAR(to_float(output.view.as<Float16>()[j]), wanted, 1e-3 * std::fabs(wanted) + 2e-4) << first << " " << j;
    }
  }
}

// A 16-bit output is the fp32 one rounded, a 16-bit residual or gradient the fp32 one with the same values: bit for
// bit, for each kernel of the CPU.
TEST(RowNorm, MixedPrecisionGivesTheSameNumbers) {
  OwnContext context;
  for (const DType narrow : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t columns : {1, 31, 64, 1000}) {
      const std::vector<int64_t> sizes{7, columns};
      Tensor x(DType::kFloat32, sizes), weight(DType::kFloat32, {columns}), bias(DType::kFloat32, {columns});
      Tensor residual(narrow, sizes, 1), wide_residual(DType::kFloat32, sizes), sum(DType::kFloat32, sizes);
      Tensor wide(DType::kFloat32, sizes), output(narrow, sizes), wide_sum(DType::kFloat32, sizes);
      Tensor mean(DType::kFloat32, {7}), rstd(DType::kFloat32, {7});
      const auto at = [&](const Tensor& tensor, int64_t i) {
        return load_element(tensor.view.data, tensor.view.dtype, i);
      };
      for (int64_t i = 0; i < 7 * columns; ++i) {
        wide_residual.view.as<float>()[i] = static_cast<float>(at(residual, i));
      }
      layer_norm::Forward forward{.x = x.view, .weight = weight.view, .bias = bias.view};
      forward.residual = wide_residual.view, forward.output = wide.view, forward.sum = wide_sum.view;
      layer_norm::forward(forward, context);
      forward.residual = residual.view, forward.output = output.view, forward.sum = sum.view;
      forward.mean = mean.view, forward.rstd = rstd.view;
      layer_norm::forward(forward, context);
      for (int64_t i = 0; i < 7 * columns; ++i) {
        // The rounding of the narrow type, and where the bias cancels the rest what one FMA rounds less than two steps:
        // the compiler forms FMAs in each instance of the kernel as it likes.
        const double rounding = std::abs(at(wide, i)) * (narrow == DType::kBFloat16 ? 0x1p-8 : 0x1p-11);
        ASSERT_NEAR(at(output, i), at(wide, i), rounding + 0x1p-20) << narrow << " " << columns << " " << i;
        ASSERT_EQ(at(sum, i), at(wide_sum, i));
      }
      Tensor first(DType::kFloat32, sizes), second(DType::kFloat32, sizes), first_weight(DType::kFloat32, {columns}),
          second_weight(DType::kFloat32, {columns});
      layer_norm::Backward backward{.grad_output = residual.view, .value = sum.view, .weight = weight.view};
      backward.mean = mean.view, backward.rstd = rstd.view, backward.grad_sum = x.view;
      backward.grad_input = first.view, backward.grad_weight = first_weight.view;
      layer_norm::backward(backward, context);
      backward.grad_output = wide_residual.view;
      backward.grad_input = second.view, backward.grad_weight = second_weight.view;
      layer_norm::backward(backward, context);
      for (int64_t i = 0; i < 7 * columns; ++i) ASSERT_EQ(at(first, i), at(second, i));
      for (int64_t i = 0; i < columns; ++i) ASSERT_EQ(at(first_weight, i), at(second_weight, i));
    }
  }
}

TEST(RowNorm, EmptyInputsWriteNothingButZeroGradients) {
  OwnContext context;
  for (auto sizes : {std::vector<int64_t>{0, 16}, {4, 0}, {0, 0}, {3, 0, 16}}) {
    Tensor x(DType::kFloat32, sizes), output(DType::kFloat32, sizes), weight(DType::kFloat32, {sizes.back()});
    Tensor rstd(DType::kFloat32, {rows_of(x.view)}), grad_weight(DType::kFloat32, {sizes.back()});
    rms_norm::Forward forward{.x = x.view, .weight = weight.view, .output = output.view, .rstd = rstd.view};
    rms_norm::forward(forward, context);
    if (sizes.back() == 0) continue;
    rms_norm::Backward backward{.grad_output = x.view, .value = x.view, .weight = weight.view, .rstd = rstd.view};
    backward.grad_input = output.view;
    backward.grad_weight = grad_weight.view;
    rms_norm::backward(backward, context);
    for (int64_t j = 0; j < sizes.back(); ++j) EXPECT_EQ(grad_weight.view.as<float>()[j], 0.0f);
  }
}

TEST(RowNorm, WeightGradientDoesNotDependOnThreads) {
  Tensor x(DType::kBFloat16, {517, 300}), gradient(DType::kBFloat16, {517, 300}), weight(DType::kBFloat16, {300});
  Tensor rstd(DType::kFloat32, {517}), grad_input(DType::kBFloat16, {517, 300});
  Tensor first(DType::kBFloat16, {300}), second(DType::kBFloat16, {300});
  for (int i = 0; i < 517; ++i) rstd.view.as<float>()[i] = 1.0f + static_cast<float>(i) / 517;
  const auto run = [&](TensorView grad_weight, Threads* threads) {
    OwnContext context;
    if (threads == nullptr) context->threads = nullptr;
    rms_norm::Backward arguments{
        .grad_output = gradient.view, .value = x.view, .weight = weight.view, .rstd = rstd.view};
    arguments.grad_input = grad_input.view;
    arguments.grad_weight = grad_weight;
    rms_norm::backward(arguments, context);
  };
  OwnContext pool;
  run(first.view, nullptr);
  for (int repeat = 0; repeat < 20; ++repeat) {
    run(second.view, pool->threads);
    ASSERT_EQ(std::memcmp(first.view.data, second.view.data, 600), 0);
  }
}

void expect_error(const std::function<void()>& call, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
  }
}

TEST(RowNorm, ErrorsNameTheOpBothValuesAndTheCure) {
  Tensor x(DType::kFloat32, {4, 16}), output(DType::kFloat32, {4, 16}), weight(DType::kFloat32, {15});
  Tensor narrow(DType::kBFloat16, {16}), integers(DType::kInt32, {4, 16}), other(DType::kFloat32, {4, 17});
  OwnContext context;
  const rms_norm::Forward good{.x = x.view, .output = output.view};
  const auto with = [&](auto change) {
    return [&, change] {
      rms_norm::Forward arguments = good;
      change(arguments);
      rms_norm::forward(arguments, context);
    };
  };
  expect_error(with([&](auto& a) { a.weight = weight.view; }),
               "rms_norm: weight has shape [15], the last dimension of x is 16");
  expect_error(with([&](auto& a) { a.weight = narrow.view; }), "rms_norm: weight is bf16, x is fp32; it must be fp32");
  expect_error(with([&](auto& a) { a.x = integers.view; }), "rms_norm: x is int32; convert it");
  expect_error(with([&](auto& a) { a.eps = -1; }), "rms_norm: eps is -1; it must be finite and not negative");
  expect_error(with([&](auto& a) { a.eps = std::nan(""); }), "rms_norm: eps is nan");
  expect_error(with([&](auto& a) { a.residual = other.view; }), "rms_norm: residual has shape [4, 17], x has [4, 16]");
  expect_error(with([&](auto& a) { a.residual = x.view; }), "residual and sum go together");
  Tensor half(DType::kFloat16, {4, 16}), wide(DType::kFloat64, {4, 16});
  expect_error(with([&](auto& a) { a.x = half.view; }),
               "rms_norm: output is fp32, x is fp16; it must have that type, or be bf16 or fp16 where x is fp32");
  expect_error(with([&](auto& a) { a.residual = wide.view; }), "rms_norm: residual is fp64, x is fp32");
  expect_error(with([&](auto& a) { a.output = {}; }), "rms_norm: output is missing");
  expect_error(with([&](auto& a) { a.output = transpose(output.view, 0, 1); }), "rms_norm: output has shape [16, 4]");
  expect_error(with([&](auto& a) {
                 a.x.device = {DeviceKind::kCuda, 0};
               }),
               "rms_norm: x is on cuda:0, the call runs on cpu; move all tensors to one device");
  expect_error(with([&](auto& a) { a.x = {}; }), "rms_norm: x is missing");
}

// Rows so far apart that an offset of 32 bits would end elsewhere: only their own pages exist.
TEST(RowNorm, RowsFurtherApartThanTwoToThe31Elements) {
  constexpr int64_t kRows = 3, kColumns = 100, kApart = int64_t{1} << 31;
  constexpr size_t kBytes = ((kRows - 1) * kApart + kColumns) * sizeof(BFloat16);
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Tensor close(DType::kBFloat16, {kRows, kColumns}), expected(DType::kBFloat16, {kRows, kColumns});
  Tensor output(DType::kBFloat16, {kRows, kColumns});
  TensorView x = close.view;
  x.data = memory;
  x.strides[0] = kApart;
  for (int64_t row = 0; row < kRows; ++row) {
    std::memcpy(x.as<BFloat16>() + row * kApart, close.view.as<BFloat16>() + row * kColumns,
                kColumns * sizeof(BFloat16));
  }
  OwnContext context;
  rms_norm::Forward arguments{
      .x = close.view, .residual = {}, .weight = {}, .eps = 1e-5, .output = expected.view, .sum = {}, .rstd = {}};
  rms_norm::forward(arguments, context);
  arguments.x = x, arguments.output = output.view;
  rms_norm::forward(arguments, context);
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    ASSERT_EQ(load_element(output.view.data, DType::kBFloat16, i),
              load_element(expected.view.data, DType::kBFloat16, i))
        << i;
  }
  munmap(memory, kBytes);
}

TEST(RowNorm, MoreThanTwoToThe31Elements) {
  // Rows that all share one piece of memory: the offsets are what is tested.
  Tensor x(DType::kBFloat16, {1, 4096});
  TensorView tall = x.view;
  tall.sizes[0] = 600'000;  // 2.4e9 elements
  tall.strides[0] = 0;
  std::vector<float> rstd(600'000);
  Tensor gradient(DType::kBFloat16, {1, 4096}), grad_weight(DType::kFloat32, {4096}), weight(DType::kFloat32, {4096});
  TensorView tall_gradient = tall;
  tall_gradient.data = gradient.view.data;
  std::fill(rstd.begin(), rstd.end(), 1.0f);
  rms_norm::Backward arguments{.grad_output = tall_gradient, .value = tall, .weight = weight.view};
  arguments.rstd = contiguous_view(rstd.data(), DType::kFloat32, {600'000});
  arguments.grad_weight = grad_weight.view;
  OwnContext context;
  rms_norm::backward(arguments, context);
  for (int j = 0; j < 4096; ++j) {
    const double expected = 600'000.0 * load_element(x.view.data, DType::kBFloat16, j) *
                            load_element(gradient.view.data, DType::kBFloat16, j);
    ASSERT_NEAR(grad_weight.view.as<float>()[j], expected, 1e-2 + 2e-3 * std::abs(expected)) << j;
  }
}

}  // namespace
}  // namespace kernel_pytorch::row_norm
