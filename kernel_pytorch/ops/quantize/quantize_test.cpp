// Rounding bit by bit against a table made from the formats' definitions, kernels bit by bit against each other, and
// what the shape list cannot say: infinities, zeros, strides, stochastic rounding, bad arguments.
#include "kernel_pytorch/ops/quantize/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/ops/quantize/operation.h"

namespace kernel_pytorch::quantize {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
TensorView codes_of(std::vector<uint8_t>& codes, DType dtype, std::initializer_list<int64_t> sizes) {
  return contiguous_view(codes.data(), dtype, sizes);
}

// The finite values of a format in ascending order of their codes, from its definition: sign, exponent, mantissa.
struct Table {
  DType dtype;
  std::vector<double> values;  // of codes 0, 1, 2, ... without a sign
  uint8_t nan;

  explicit Table(DType type) : dtype(type), nan(0x7f) {
    const bool is_e5m2 = type == DType::kFloat8E5M2;
    const int mantissa_bits = is_e5m2 ? 2 : 3, bias = is_e5m2 ? 15 : 7, codes = is_e5m2 ? 0x7c : 0x7f;
    for (int code = 0; code < codes; ++code) {
      const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
      const double fraction = mantissa / static_cast<double>(1 << mantissa_bits);
      values.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias));
    }
  }
  // The nearest value, of two equally near the one with an even code, at most the largest.
  uint8_t nearest(float value) const {
    if (std::isnan(value)) return static_cast<uint8_t>(nan | (std::signbit(value) ? 0x80 : 0));
    const double magnitude = std::fabs(static_cast<double>(value));
    size_t best = 0;
    for (size_t i = 1; i < values.size(); ++i) {
      const double now = std::fabs(values[i] - magnitude), before = std::fabs(values[best] - magnitude);
      if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    if (magnitude > values.back()) best = values.size() - 1;
    return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
  }
};

// Every value, every middle of two, the floats next to both, and what lies outside, with both signs.
std::vector<float> probes_of(const Table& table) {
  std::vector<float> probes = {0, kNaN, kInfinity, 1e-45f, 1e-38f, 1e30f, 3e38f};
  const auto add = [&](double value) {
    const auto single = static_cast<float>(value);
    for (float probe : {single, std::nextafter(single, kInfinity), std::nextafter(single, -kInfinity)}) {
      probes.push_back(probe);
    }
  };
  for (size_t i = 0; i < table.values.size(); ++i) {
    add(table.values[i]);
    add(i + 1 < table.values.size() ? (table.values[i] + table.values[i + 1]) / 2 : table.values[i] * 1.06);
  }
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i)
    probes.push_back(std::ldexp(static_cast<float>(random() % 65536), int(random() % 60) - 45));
  const size_t count = probes.size();
  for (size_t i = 0; i < count; ++i) probes.push_back(-probes[i]);
  return probes;
}

TEST(Quantize, RoundsAsATableOfAllCodes) {
  for (DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const Table table(dtype);
    std::vector<float> probes = probes_of(table), one = {1};
    const auto count = static_cast<int64_t>(probes.size());
    for (std::string_view kernel : {"cpu_tiles", "reference"}) {
      OwnContext context;
      context->kernel_override = kernel;
      std::vector<uint8_t> codes(probes.size());
      quantize(
          {.x = view_of(probes, {1, count}), .scale = view_of(one, {1}), .codes = codes_of(codes, dtype, {1, count})},
          context);
      for (size_t i = 0; i < probes.size(); ++i) {
        ASSERT_EQ(codes[i], table.nearest(probes[i])) << name_of(dtype) << " " << kernel << " of " << probes[i];
      }
    }
  }
}

TEST(Quantize, DecodesAsATableOfAllCodes) {
  for (DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    const Table table(dtype);
    for (int code = 0; code < 256; ++code) {
      const auto bits = static_cast<uint8_t>(code);
      const float value = dtype == DType::kFloat8E4M3 ? to_float(Float8E4M3{bits}) : to_float(Float8E5M2{bits});
      const size_t magnitude = code & 0x7f;
      if (magnitude < table.values.size()) {
        EXPECT_EQ(value, table.values[magnitude] * (code < 128 ? 1 : -1)) << code;
        EXPECT_EQ(std::signbit(value), code >= 128);
      } else if (dtype == DType::kFloat8E5M2 && magnitude == 0x7c) {
        EXPECT_EQ(value, code < 128 ? kInfinity : -kInfinity);
      } else {
        EXPECT_TRUE(std::isnan(value)) << code;
      }
    }
  }
}

// A call and what it wrote.
struct Case {
  int64_t rows, columns;
  Granularity granularity;
  DType dtype;
  bool is_stochastic;
  bool is_square = false;
  std::vector<float> x;
  std::vector<uint8_t> codes, transposed;
  std::vector<float> scales, transposed_scales, amax = {0}, found_nonfinite = {0};

  Case(int64_t rows, int64_t columns, Granularity granularity, DType dtype, bool is_stochastic)
      : rows(rows), columns(columns), granularity(granularity), dtype(dtype), is_stochastic(is_stochastic) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i)
      x.push_back(normal(random) * std::exp2(static_cast<float>(i % 23) - 12));
    codes.resize(x.size());
    transposed.resize(x.size());
  }
  static std::array<int64_t, 2> scale_sizes(Granularity granularity, int64_t rows, int64_t columns) {
    const int64_t groups = (rows + 127) / 128, blocks = (columns + 127) / 128;
    switch (granularity) {
      case Granularity::kTensor:
        return {1, 1};
      case Granularity::kRow:
        return {rows, 1};
      case Granularity::k1x128:
        return {rows, blocks};
      case Granularity::k128x128:
        break;
    }
    return {groups, blocks};
  }
  void run(std::string_view kernel) {
    OwnContext context;
    context->kernel_override = kernel;
    const auto sizes = scale_sizes(granularity, rows, columns);
    const auto across = scale_sizes(is_square ? Granularity::k128x128 : granularity, columns, rows);
    scales.assign(static_cast<size_t>(sizes[0] * sizes[1]), -1);
    transposed_scales.assign(static_cast<size_t>(across[0] * across[1]), -1);
    std::vector<int64_t> seed = {5, 9};
    Quantize arguments{.x = view_of(x, {rows, columns}),
                       .granularity = granularity,
                       .square_transpose = is_square,
                       .codes = codes_of(codes, dtype, {rows, columns}),
                       .transposed = codes_of(transposed, dtype, {columns, rows}),
                       .scales = view_of(scales, {sizes[0], sizes[1]}),
                       .amax = view_of(amax, {1}),
                       .found_nonfinite = view_of(found_nonfinite, {1})};
    if (granularity == Granularity::kRow || granularity == Granularity::k1x128) {
      arguments.transposed_scales = view_of(transposed_scales, {across[0], across[1]});
    }
    if (is_stochastic) arguments.seed = contiguous_view(seed.data(), DType::kInt64, {2});
    quantize(arguments, context);
  }
};

TEST(Quantize, KernelsAgreeBitForBit) {
  for (Granularity granularity :
       {Granularity::kTensor, Granularity::kRow, Granularity::k1x128, Granularity::k128x128}) {
    for (auto [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {3, 200}, {130, 7}, {200, 300}}) {
      for (bool is_stochastic : {false, true}) {
        for (bool has_nonfinite : {false, true}) {
          const DType dtype = rows == 3 ? DType::kFloat8E5M2 : DType::kFloat8E4M3;
          Case fast(rows, columns, granularity, dtype, is_stochastic);
          if (has_nonfinite) fast.x[0] = kInfinity, fast.x.back() = kNaN;
          fast.is_square = granularity == Granularity::k1x128 && rows % 2 == 0;
          Case plain = fast;
          fast.run("cpu_tiles");
          plain.run("reference");
          EXPECT_EQ(fast.codes, plain.codes);
          EXPECT_EQ(fast.transposed, plain.transposed);
          EXPECT_EQ(fast.scales, plain.scales);
          EXPECT_EQ(fast.transposed_scales, plain.transposed_scales);
          EXPECT_EQ(fast.amax, plain.amax);
          EXPECT_EQ(fast.found_nonfinite[0], has_nonfinite ? 1 : 0);
          EXPECT_EQ(plain.found_nonfinite[0], has_nonfinite ? 1 : 0);
        }
      }
    }
  }
}

TEST(Quantize, ScalesAreFiniteWhateverTheValues) {
  Case zero(4, 300, Granularity::kRow, DType::kFloat8E4M3, false);
  std::fill_n(zero.x.begin(), 300, 0.0f);
  std::fill_n(zero.x.begin() + 300, 300, kNaN);
  std::fill_n(zero.x.begin() + 600, 300, 1e-45f);
  zero.x[900] = kInfinity;
  zero.run("");
  EXPECT_EQ(zero.scales[0], 1);
  EXPECT_EQ(zero.scales[1], 1);
  EXPECT_EQ(zero.scales[2], 0x1p-126f);
  EXPECT_LT(zero.scales[3], 100);
  EXPECT_EQ(zero.codes[0], 0);
  EXPECT_EQ(zero.codes[300], 0x7f);
  EXPECT_EQ(zero.codes[900], 0x7e);
  EXPECT_EQ(zero.found_nonfinite[0], 1);
}

TEST(Quantize, MarginAndPowersOfTwo) {
  OwnContext context;
  std::vector<float> x = {-3, 1, 0.5f}, scales = {0};
  std::vector<uint8_t> codes(3);
  Quantize arguments{.x = view_of(x, {1, 3}),
                     .power_of_two = true,
                     .codes = codes_of(codes, DType::kFloat8E4M3, {1, 3}),
                     .scales = view_of(scales, {1})};
  quantize(arguments, context);
  EXPECT_EQ(scales[0], 0x1p-7f);  // 3 / 448 lies between 2^-8 and 2^-7
  arguments.margin = 2;
  quantize(arguments, context);
  EXPECT_EQ(scales[0], 0x1p-5f);
  arguments.power_of_two = false;
  quantize(arguments, context);
  EXPECT_EQ(scales[0], 3.0f / 448.0f * 4);
}

// Each value goes to one of its two neighbours, as often as it is near; values of the grid stay.
TEST(Quantize, StochasticRoundingIsUnbiased) {
  OwnContext context;
  const int64_t count = 1 << 16;
  std::vector<float> one = {1};
  std::vector<int64_t> seed = {11, 4};
  for (auto [value, low, high] : {std::tuple<float, float, float>{1.03125f, 1, 1.125f},
                                  {-3.9f, -4, -3.75f},
                                  {0x1.8p-9f, 0x1p-9f, 0x1p-8f},
                                  {0x1p-11f, 0, 0x1p-9f},
                                  {2.5f, 2.5f, 2.5f}}) {
    std::vector<float> x(count, value);
    std::vector<uint8_t> codes(count);
    quantize({.x = view_of(x, {count / 256, 256}),
              .scale = view_of(one, {1}),
              .seed = contiguous_view(seed.data(), DType::kInt64, {2}),
              .codes = codes_of(codes, DType::kFloat8E4M3, {count / 256, 256})},
             context);
    double sum = 0;
    for (uint8_t code : codes) {
      const float rounded = to_float(Float8E4M3{code});
      ASSERT_TRUE(rounded == low || rounded == high) << rounded;
      sum += rounded;
    }
    EXPECT_NEAR(sum / count, value, 4 * (high - low) / 2 / 256) << value;  // four standard errors
  }
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(Quantize, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(12), scales(4), one = {1};
  std::vector<uint8_t> codes(12), across(12);
  const Quantize good{
      .x = view_of(x, {3, 4}), .codes = codes_of(codes, DType::kFloat8E4M3, {3, 4}), .scales = view_of(scales, {1})};
  const auto check = [&](const std::function<void(Quantize&)>& spoil, std::string_view words) {
    Quantize bad = good;
    spoil(bad);
    const std::string message = message_of([&] { quantize(bad, context); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  check([&](Quantize& q) { q.x.dtype = DType::kInt32; }, "x is int32; convert it");
  check([&](Quantize& q) { q.codes = TensorView{}; }, "neither codes nor transposed");
  check([&](Quantize& q) { q.codes.sizes = {4, 3}; }, "codes has shape [4, 3]; it must be [3, 4]");
  check([&](Quantize& q) { q.scales = view_of(scales, {3}); }, "scales has shape [3]; it must be [1, 1]");
  check([&](Quantize& q) { q.scale = view_of(one, {1}); }, "a scale is given");
  check([&](Quantize& q) { q.square_transpose = true; }, "square_transpose is set; it is for 1x128 blocks");
  check([&](Quantize& q) { q.margin = 40; }, "margin is 40");
  check([&](Quantize& q) { q.seed = view_of(one, {1}); }, "seed is fp32[1]");
  check(
      [&](Quantize& q) {
        q.granularity = Granularity::kRow;
        q.scales = view_of(scales, {3});
        q.transposed = codes_of(across, DType::kFloat8E4M3, {4, 3});
      },
      "transposed_scales are missing");
  check([&](Quantize& q) { q.transposed = codes_of(across, DType::kFloat8E5M2, {4, 3}); }, "they must have one type");
}

TEST(Quantize, BadProducerIsNamed) {
  OwnContext context;
  std::vector<float> x(12), up(12), weight(4), sum(12), value(24), one = {1};
  std::vector<uint8_t> codes(24);
  const Quantize gate{.x = view_of(x, {3, 4}),
                      .scale = view_of(one, {1}),
                      .codes = codes_of(codes, DType::kFloat8E4M3, {3, 4}),
                      .source = Source::kGate,
                      .up = view_of(up, {3, 4})};
  const auto check = [&](const std::function<void(Quantize&)>& spoil, std::string_view words) {
    Quantize bad = gate;
    spoil(bad);
    const std::string message = message_of([&] { quantize(bad, context); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  check([&](Quantize& q) { q.up = TensorView{}; }, "up is missing");
  check([&](Quantize& q) { q.up = view_of(up, {4, 3}); }, "up has shape [4, 3], x has [3, 4]");
  check([&](Quantize& q) { q.kind = pointwise::Kind::kTanh; }, "kind is \"tanh\"; a gate is gelu");
  check([&](Quantize& q) { q.grad_output = view_of(up, {3, 4}); }, "grad_output is given");
  check([&](Quantize& q) { q.weight = view_of(weight, {4}); }, "they are for norms");
  check([&](Quantize& q) { q.source = Source::kNorm; }, "they are for gates");
  check(
      [&](Quantize& q) {
        remove_producer(q), q.value = view_of(value, {3, 4});
      },
      "value is given; x is rounded as it is");
  check(
      [&](Quantize& q) {
        remove_producer(q), q.source = Source::kNorm, q.sum = view_of(sum, {3, 4});
      },
      "residual and sum go together");
  check([&](Quantize& q) { remove_producer(q), q.source = Source::kNorm, q.eps = -1; }, "eps is -1");
  check(
      [&](Quantize& q) {
        q.source = Source::kGateGradient;
        q.grad_output = view_of(up, {3, 4});
      },
      "codes has shape [3, 4]; it must be [3, 8]");
}

// relu has no rounding of its own: both kernels give the codes of the table.
TEST(Quantize, OfAGateItsValueIsRounded) {
  const Table table(DType::kFloat8E4M3);
  std::vector<float> x = {1.5f, -2, 3, kInfinity, 0.25f, 7}, up = {2, 5, -1.0625f, 1, 0.3f, 100}, one = {1};
  for (std::string_view kernel : {"composed", "reference"}) {
    OwnContext context;
    context->kernel_override = kernel;
    std::vector<uint8_t> codes(6);
    std::vector<float> value(6), amax = {0}, found_nonfinite = {0};
    quantize({.x = view_of(x, {2, 3}),
              .scale = view_of(one, {1}),
              .codes = codes_of(codes, DType::kFloat8E4M3, {2, 3}),
              .amax = view_of(amax, {1}),
              .found_nonfinite = view_of(found_nonfinite, {1}),
              .source = Source::kGate,
              .kind = pointwise::Kind::kRelu,
              .up = view_of(up, {2, 3}),
              .value = view_of(value, {2, 3})},
             context);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(value[i], std::max(x[i], 0.0f) * up[i]) << kernel;
      EXPECT_EQ(codes[i], table.nearest(value[i])) << kernel << " of " << value[i];
    }
    EXPECT_EQ(amax[0], 700.0f);
    EXPECT_EQ(found_nonfinite[0], 1.0f);
  }
}

}  // namespace
}  // namespace kernel_pytorch::quantize
