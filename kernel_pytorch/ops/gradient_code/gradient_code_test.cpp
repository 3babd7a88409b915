// What the shape list cannot say: messages whose codes and scales are parts of one buffer, numbers next to ties and at
// both ends of fp32, blocks that are no numbers, and bad arguments. Kernels are compared with the reference bit for
// bit.
#include "kernel_pytorch/ops/gradient_code/gradient_code.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::gradient_code {
namespace {

constexpr Code kAll[] = {Code::kInt8, Code::kInt4, Code::kOneBit};
constexpr float kLargest = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();

// Codes and scales of each row side by side, as they are sent.
struct Message {
  std::vector<uint32_t> words;
  int64_t rows, columns;
  Code code;

  Message(Code code, int64_t rows, int64_t columns)
      : words(static_cast<size_t>(rows * row_words(code, columns)), 0xabababab),
        rows(rows),
        columns(columns),
        code(code) {}
  static int64_t code_bytes(Code code, int64_t columns) { return columns * bits_of(code) / 8; }
  static int64_t row_words(Code code, int64_t columns) {
    return code_bytes(code, columns) / 4 + columns / block_elements(code);
  }
  TensorView codes() {
    TensorView view = contiguous_view(words.data(), DType::kInt8, {rows, code_bytes(code, columns)});
    view.strides[0] = 4 * row_words(code, columns);
    return view;
  }
  TensorView scales() {
    TensorView view = contiguous_view(words.data() + code_bytes(code, columns) / 4, DType::kFloat32,
                                      {rows, columns / block_elements(code)});
    view.strides[0] = row_words(code, columns);
    return view;
  }
};

struct Result {
  Message message;
  std::vector<float> error, numbers, mean;
};

Result run(Code code, std::vector<float> x, std::vector<float> error, int64_t rows, bool carries,
           std::string_view kernel) {
  OwnContext context;
  context->kernel_override = kernel;
  const auto count = static_cast<int64_t>(x.size());
  const int64_t columns = ((count + rows - 1) / rows + kTile - 1) / kTile * kTile;
  Result result{Message(code, rows, columns), std::move(error), std::vector<float>(x.size(), 7),
                std::vector<float>(static_cast<size_t>(columns))};
  const auto view = [](std::vector<float>& values) {
    return contiguous_view(values.data(), DType::kFloat32, {static_cast<int64_t>(values.size())});
  };
  Message& message = result.message;
  encode({.x = view(x),
          .error = result.error.empty() ? TensorView() : view(result.error),
          .codes = message.codes(),
          .scales = message.scales(),
          .code = code,
          .carries = carries,
          .gain = 3},
         context);
  decode({.codes = message.codes(),
          .scales = message.scales(),
          .output = view(result.numbers),
          .code = code,
          .adds = true},
         context);
  decode(
      {.codes = message.codes(), .scales = message.scales(), .output = view(result.mean), .code = code, .mean = true},
      context);
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void expect_reference(Code code, const std::vector<float>& x, const std::vector<float>& error, int64_t rows) {
  for (const bool carries : {true, false}) {
    const Result mine = run(code, x, error, rows, carries, "cpu");
    const Result reference = run(code, x, error, rows, carries, "reference");
    EXPECT_EQ(mine.message.words, reference.message.words) << static_cast<int>(code);
    EXPECT_TRUE(same_bits(mine.error, reference.error)) << static_cast<int>(code);
    EXPECT_TRUE(same_bits(mine.numbers, reference.numbers)) << static_cast<int>(code);
    EXPECT_TRUE(same_bits(mine.mean, reference.mean)) << static_cast<int>(code);
  }
}

TEST(GradientCode, RandomNumbersAndMessagesOfOneBuffer) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (const Code code : kAll) {
    for (const int64_t count : {1, 255, 256, 257, 3000}) {
      std::vector<float> x(static_cast<size_t>(count)), error(x.size());
      for (float& value : x) value = normal(random) * std::exp2(10 * normal(random));
      for (float& value : error) value = normal(random);
      for (const int64_t rows : {1, 3}) expect_reference(code, x, error, rows);
      expect_reference(code, x, {}, 2);
    }
  }
}

TEST(GradientCode, TiesAndTheEndsOfFloats) {
  for (const Code code : kAll) {
    for (const float most :
         {1.0f, 127.0f, code == Code::kOneBit ? 0x1p119f : kLargest, 0x1p-120f, 0x1p-126f, 0x1p-149f, 0.0f}) {
      std::vector<float> x(kTile);
      x[0] = most;
      const float half = most / largest_step(code) / 2;
      for (int i = 1; i < kTile; ++i) {
        const float middle = half * static_cast<float>(2 * (i % 100) + 1);
        const float near = i % 3 == 0 ? middle : std::nextafter(middle, i % 3 == 1 ? 0 : kLargest);
        x[i] = std::fabs(near) <= most ? (i % 2 == 0 ? near : -near) : 0;
      }
      expect_reference(code, x, std::vector<float>(kTile), 1);
    }
  }
}

TEST(GradientCode, BlocksThatAreNoNumbersSaySoAndLeaveNoError) {
  for (const Code code : kAll) {
    for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
      for (const std::string_view kernel : {"cpu", "reference"}) {
        std::vector<float> x(3 * kTile, 1.0f);
        x[kTile + 3] = bad;
        const Result result = run(code, x, std::vector<float>(x.size(), 0.5f), 1, true, kernel);
        for (int i = 0; i < block_elements(code); ++i) EXPECT_TRUE(std::isnan(result.numbers[kTile + i]));
        EXPECT_TRUE(std::isfinite(result.numbers[0]) && std::isfinite(result.numbers[2 * kTile]));
        for (const float error : result.error) EXPECT_TRUE(std::isfinite(error));
      }
    }
  }
}

TEST(GradientCode, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> x(300), error(300);
  Message message(Code::kInt8, 2, 256);
  const Encode good{.x = contiguous_view(x.data(), DType::kFloat32, {300}),
                    .error = contiguous_view(error.data(), DType::kFloat32, {300}),
                    .codes = message.codes(),
                    .scales = message.scales()};
  encode(good, context);
  const auto message_of = [&](const std::function<void(Encode&)>& change) {
    Encode bad = good;
    change(bad);
    try {
      encode(bad, context);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto expect = [](const std::string& message, const char* words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  expect(message_of([](Encode& e) { e.x.dtype = DType::kInt64; }), "convert it to fp32, bf16 or fp16");
  expect(message_of([](Encode& e) { e.x.strides[0] = 2; }), "flatten it");
  expect(message_of([](Encode& e) { e.error.sizes[0] = 299; }), "as long as x");
  expect(message_of([](Encode& e) { e.codes.sizes[1] = 200; }), "must be a multiple of 256");
  expect(message_of([](Encode& e) { e.codes.sizes[0] = e.scales.sizes[0] = 1; }), "room for 256");
  expect(message_of([](Encode& e) { e.scales.sizes[1] = 2; }), "has 1 scales");
  expect(message_of([](Encode& e) { e.codes.data = e.codes.as<char>() + 1; }), "multiples of 4 bytes");
  expect(message_of([](Encode& e) { e.codes = TensorView(); }), "codes is missing");
}

}  // namespace
}  // namespace kernel_pytorch::gradient_code
