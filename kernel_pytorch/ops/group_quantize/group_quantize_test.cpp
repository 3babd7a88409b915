// What the shape list cannot say: every code, every tie and its neighbours at every scale, every bf16 number, odd
// groups and bad arguments. Kernels are compared with the reference bit for bit.
#include "kernel_pytorch/ops/group_quantize/group_quantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch::group_quantize {
namespace {

constexpr Format kAll[] = {Format::kNvfp4, Format::kMxfp4, Format::kMxfp8, Format::kInt4, Format::kInt8,
                           Format::kInt2,  Format::kInt3,  Format::kInt5,  Format::kInt6};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t smallest_group(Format format) {
  return format == Format::kNvfp4 ? 16 : 32;
}

struct Coded {
  std::vector<uint8_t> codes, scales, zeros;
  bool operator==(const Coded&) const = default;
};

struct Call {
  Format format = Format::kNvfp4;
  int64_t group = 16;
  bool has_zeros = false;
  std::vector<int64_t> seed = {};
  float tensor_scale = 1;
};

Coded quantized(const Call& call, DType dtype, void* x, int64_t rows, int64_t columns, std::string_view kernel) {
  OwnContext context;
  context->kernel_override = kernel;
  const int64_t groups = (columns + call.group - 1) / call.group,
                bytes = group_format::code_bytes(call.format, columns);
  const DType scale_type = scale_type_of(call.format, dtype);
  Coded coded{.codes = std::vector<uint8_t>(rows * bytes, 0xaa),
              .scales = std::vector<uint8_t>(rows * groups * size_of(scale_type), 0xaa),
              .zeros = std::vector<uint8_t>(call.has_zeros ? rows * groups : 0, 0xaa)};
  std::vector<int64_t> seed = call.seed;
  float tensor_scale = call.tensor_scale;
  Quantize arguments{.x = contiguous_view(x, dtype, {rows, columns}),
                     .format = call.format,
                     .group = call.group,
                     .codes = contiguous_view(coded.codes.data(), DType::kInt8, {rows, bytes}),
                     .scales = contiguous_view(coded.scales.data(), scale_type, {rows, groups})};
  if (call.format == Format::kNvfp4) arguments.tensor_scale = contiguous_view(&tensor_scale, DType::kFloat32, {1});
  if (!seed.empty()) arguments.seed = contiguous_view(seed.data(), DType::kInt64, {2});
  if (call.has_zeros) arguments.zeros = contiguous_view(coded.zeros.data(), DType::kInt8, {rows, groups});
  quantize(arguments, context);
  return coded;
}

std::vector<float> dequantized(const Call& call, Coded& coded, DType scale_type, int64_t rows, int64_t columns,
                               std::string_view kernel) {
  OwnContext context;
  context->kernel_override = kernel;
  const int64_t groups = (columns + call.group - 1) / call.group;
  std::vector<float> values(static_cast<size_t>(rows * columns));
  float tensor_scale = call.tensor_scale;
  Dequantize arguments{
      .codes = contiguous_view(coded.codes.data(), DType::kInt8,
                               {rows, static_cast<int64_t>(coded.codes.size()) / std::max<int64_t>(rows, 1)}),
      .scales = contiguous_view(coded.scales.data(), scale_type_of(call.format, scale_type), {rows, groups}),
      .format = call.format,
      .group = call.group,
      .columns = columns,
      .output_type = OutputType::kFp32,
      .output = contiguous_view(values.data(), DType::kFloat32, {rows, columns})};
  if (call.format == Format::kNvfp4) arguments.tensor_scale = contiguous_view(&tensor_scale, DType::kFloat32, {1});
  if (!coded.zeros.empty()) arguments.zeros = contiguous_view(coded.zeros.data(), DType::kInt8, {rows, groups});
  dequantize(arguments, context);
  return values;
}

void expect_like_reference(const Call& call, DType dtype, void* x, int64_t rows, int64_t columns,
                           const std::string& what) {
  const Coded expected = quantized(call, dtype, x, rows, columns, "reference");
  const Coded actual = quantized(call, dtype, x, rows, columns, "cpu");
  ASSERT_EQ(actual.scales, expected.scales) << what << " " << static_cast<int>(call.format);
  ASSERT_EQ(actual.zeros, expected.zeros) << what << " " << static_cast<int>(call.format);
  ASSERT_EQ(actual.codes, expected.codes) << what << " " << static_cast<int>(call.format);
}

// All codes under all scales: a row of codes for each byte of a scale.
TEST(GroupQuantize, EveryCodeHasItsValueUnderEveryScale) {
  constexpr float kE2M1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kMxfp8}) {
    const int64_t columns = format == Format::kMxfp8 ? 256 : format == Format::kMxfp4 ? 32 : 16;
    const Call call{.format = format, .group = smallest_group(format), .tensor_scale = 4};
    const int64_t groups = columns / call.group;
    Coded coded;
    for (int byte = 0; byte < 256; ++byte) {
      for (int64_t column = 0; column < columns; column += group_format::codes_in_byte(format)) {
        const int64_t code = format == Format::kMxfp8 ? column : (column % 16) | (column + 1) % 16 << 4;
        coded.codes.push_back(static_cast<uint8_t>(code));
      }
      for (int64_t i = 0; i < groups; ++i) coded.scales.push_back(static_cast<uint8_t>(byte));
    }
    for (const char* kernel : {"cpu", "reference"}) {
      const std::vector<float> values = dequantized(call, coded, DType::kFloat32, 256, columns, kernel);
      for (int byte = 0; byte < 256; ++byte) {
        const double scale = format == Format::kNvfp4 ? 4.0 * to_float(Float8E4M3{static_cast<uint8_t>(byte)})
                             : byte == 255            ? std::nan("")
                                                      : std::ldexp(1.0, byte - 127);
        for (int64_t column = 0; column < columns; ++column) {
          const float code = format == Format::kMxfp8 ? to_float(Float8E4M3{static_cast<uint8_t>(column)})
                                                      : (column % 16 >= 8 ? -1.0f : 1.0f) * kE2M1[column % 8];
          const auto expected = static_cast<float>(code * scale);
          const float actual = values[byte * columns + column];
          ASSERT_TRUE(std::isnan(expected) ? std::isnan(actual) : actual == expected)
              << kernel << " " << static_cast<int>(format) << " scale " << byte << " column " << column << ": "
              << actual << " instead of " << expected;
        }
      }
    }
  }
}

// All codes of integers under all zeros: a row for each zero, its codes in turns so that each is at every place of a
// byte.
TEST(GroupQuantize, EveryCodeOfAnIntegerHasItsValueUnderEveryZero) {
  for (const Format format : {Format::kInt2, Format::kInt3, Format::kInt4, Format::kInt5, Format::kInt6}) {
    const int bits = group_format::code_bits(format), count = 1 << bits;
    const int64_t columns = 9 * count - 1, group = 32, groups = (columns + group - 1) / group;
    const Call call{.format = format, .group = group};
    const auto code_at = [&](int64_t column) { return static_cast<int>(column + column / count * 3) % count; };
    std::vector<uint8_t> row(static_cast<size_t>(group_format::code_bytes(format, columns)));
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t bit = 0; bit < bits; ++bit) {
        row[(column * bits + bit) / 8] |=
            static_cast<uint8_t>((code_at(column) >> bit & 1) << (column * bits + bit) % 8);
      }
    }
    Coded coded;
    for (int zero = 0; zero < count; ++zero) {
      coded.codes.insert(coded.codes.end(), row.begin(), row.end());
      coded.zeros.insert(coded.zeros.end(), groups, static_cast<uint8_t>(zero));
    }
    const float scale = 0.375f;
    for (int64_t i = 0; i < count * groups; ++i) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(&scale);
      coded.scales.insert(coded.scales.end(), bytes, bytes + 4);
    }
    for (const char* kernel : {"cpu", "reference"}) {
      const std::vector<float> values = dequantized(call, coded, DType::kFloat32, count, columns, kernel);
      for (int zero = 0; zero < count; ++zero) {
        for (int64_t column = 0; column < columns; ++column) {
          ASSERT_EQ(values[zero * columns + column], static_cast<float>(code_at(column) - zero) * scale)
              << kernel << " " << bits << " bits, zero " << zero << ", column " << column;
        }
      }
    }
  }
}

// Multiples of a scale on, just below and just above every boundary between two codes, with the group's largest value
// set so that the scale comes out: ties go to even codes, whichever the scale.
TEST(GroupQuantize, TiesAndTheirNeighboursAreExact) {
  for (const Format format : kAll) {
    for (const bool has_zeros : {false, true}) {
      if (has_zeros && !group_format::is_integer(format)) continue;
      const Call call{.format = format, .group = smallest_group(format), .has_zeros = has_zeros};
      std::vector<float> boundaries;
      if (group_format::is_integer(format)) {
        const int count = std::min(16, group_format::middle_code(format));
        for (int i = 0; i < count; ++i) boundaries.push_back(static_cast<float>(i) + 0.5f);
      } else if (format == Format::kMxfp8) {
        for (const float value : {0x1p-10f, 0x3p-10f, 0x1.1p-6f, 17.0f / 16, 19.0f / 16, 31.0f / 16, 432.0f, 464.0f}) {
          boundaries.push_back(value);
        }
      } else {
        for (const float value : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) boundaries.push_back(value);
      }
      const int steps = has_zeros ? group_format::last_code(format) : group_format::middle_code(format) - 1;
      const float largest = group_format::is_integer(format) ? static_cast<float>(steps)
                            : format == Format::kMxfp8       ? 448.0f
                                                             : 6.0f;
      std::vector<float> values;
      for (int exponent = -40; exponent <= 40; ++exponent) {
        for (int eighths = 8; eighths < 16; ++eighths) {
          const float scale = std::ldexp(static_cast<float>(eighths) / 8, exponent);
          std::vector<float> all;
          for (const float boundary : boundaries) {
            const float tie = boundary * scale;
            for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInfinity)}) {
              all.push_back(value);
              if (!has_zeros) all.push_back(-value);
            }
          }
          for (size_t i = 0; i < all.size(); i += static_cast<size_t>(call.group) - 1) {
            values.push_back(largest * scale);
            for (int64_t j = 0; j < call.group - 1; ++j)
              values.push_back(all[(i + static_cast<size_t>(j)) % all.size()]);
          }
        }
      }
      const auto columns = call.group;
      expect_like_reference(call, DType::kFloat32, values.data(), static_cast<int64_t>(values.size()) / columns,
                            columns, "ties");
    }
  }
}

// Neighbours of all sizes, NaN and infinities included, in one row and by chance in another order.
TEST(GroupQuantize, EveryNumberOfABf16IsCodedAlike) {
  std::vector<uint16_t> values(2 * 65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    values[i] = static_cast<uint16_t>(i);
    values[65536 + i] = static_cast<uint16_t>(i * 40503u);
  }
  for (const Format format : kAll) {
    for (const bool has_zeros : {false, true}) {
      if (has_zeros && !group_format::is_integer(format)) continue;
      for (const bool is_stochastic : {false, true}) {
        Call call{.format = format, .group = smallest_group(format), .has_zeros = has_zeros, .tensor_scale = 0.25f};
        if (is_stochastic) call.seed = {1234, 5};
        expect_like_reference(call, DType::kBFloat16, values.data(), 64, 2048,
                              is_stochastic ? "stochastic" : "nearest");
      }
    }
  }
}

TEST(GroupQuantize, CodesOfDequantizedValuesStay) {
  std::vector<float> values(64 * 200);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i) * 0.7f) * (1 + i % 5);
  for (const Format format : kAll) {
    const Call call{.format = format, .group = smallest_group(format)};
    Coded coded = quantized(call, DType::kFloat32, values.data(), 64, 200, "cpu");
    std::vector<float> once = dequantized(call, coded, DType::kFloat32, 64, 200, "cpu");
    Call random = call;
    random.seed = {1, 2};
    Coded again = quantized(random, DType::kFloat32, once.data(), 64, 200, "cpu");
    EXPECT_EQ(dequantized(call, again, DType::kFloat32, 64, 200, "cpu"), once) << static_cast<int>(format);
  }
}

// The mean of many stochastic codes is the value.
TEST(GroupQuantize, StochasticRoundingHasTheRightMean) {
  for (const Format format : kAll) {
    const int64_t group = smallest_group(format), rows = 4000;
    // 6 is the largest value of a group, and so of a symmetric format's last code; a mean's deviation grows with steps.
    const double step = group_format::is_integer(format) ? 6.0 / (group_format::middle_code(format) - 1) : 2.0;
    std::vector<float> values;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < group; ++i) values.push_back(i == 0 ? 6.0f : 0.37f * static_cast<float>(i % 8));
    }
    const Call call{.format = format, .group = group, .seed = {7, 9}};
    Coded coded = quantized(call, DType::kFloat32, values.data(), rows, group, "cpu");
    const std::vector<float> rounded = dequantized(call, coded, DType::kFloat32, rows, group, "cpu");
    for (int64_t column = 0; column < group; ++column) {
      double sum = 0;
      for (int64_t row = 0; row < rows; ++row) sum += rounded[row * group + column];
      EXPECT_NEAR(sum / static_cast<double>(rows), values[column], 0.02 + 0.04 * step)
          << static_cast<int>(format) << " " << column;
    }
  }
}

TEST(GroupQuantize, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(64);
  std::vector<int8_t> bytes(64);
  Quantize good{.x = contiguous_view(x.data(), DType::kFloat32, {2, 32}),
                .format = Format::kMxfp4,
                .group = 32,
                .codes = contiguous_view(bytes.data(), DType::kInt8, {2, 16}),
                .scales = contiguous_view(bytes.data() + 32, DType::kInt8, {2, 1})};
  quantize(good, context);
  const auto message_of = [&](const std::function<void(Quantize&)>& change) {
    Quantize bad = good;
    change(bad);
    try {
      quantize(bad, context);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_NE(message_of([](Quantize& call) { call.group = 16; }).find("group is 16"), std::string::npos);
  EXPECT_NE(message_of([](Quantize& call) { call.scales.dtype = DType::kFloat8E4M3; }).find("scales are e4m3"),
            std::string::npos);
  EXPECT_NE(message_of([](Quantize& call) { call.codes.sizes[1] = 15; }).find("codes have shape"), std::string::npos);
  EXPECT_NE(message_of([](Quantize& call) { call.zeros = call.scales; }).find("zeros are given"), std::string::npos);
  EXPECT_NE(message_of([](Quantize& call) { call.x.dtype = DType::kFloat64; }).find("x is fp64"), std::string::npos);
  EXPECT_NE(message_of([](Quantize& call) { call.x = {}; }).find("x is missing"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::group_quantize
