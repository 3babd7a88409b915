// The references: block after block, as the contract says it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/gradient_code/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::gradient_code {
namespace {

float mean_magnitude(const std::vector<float>& values) {
  float sums[32];
  for (int k = 0; k < 32; ++k) {
    const auto at = [&](int i) { return std::fabs(values[i]); };
    const int a = 4 * k, b = 128 + 4 * k;
    sums[k] = ((at(a) + at(a + 1)) + (at(a + 2) + at(a + 3))) + ((at(b) + at(b + 1)) + (at(b + 2) + at(b + 3)));
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0] / 256;
}

float scale_of(Code code, const std::vector<float>& values) {
  float largest = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(value));
  }
  const float scale = code == Code::kOneBit ? mean_magnitude(values) : largest / largest_step(code);
  return std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN();
}

// -1 and 1, or the nearest integer.
float step_of(Code code, float value, float scale) {
  if (code == Code::kOneBit) return value >= 0 ? 1.0f : -1.0f;
  const float inverse = scale >= kLeastScale ? 1 / scale : 0;
  return static_cast<float>(std::nearbyint(double{value} * double{inverse}));  // the product is exact
}

void put(Code code, uint8_t* row, int64_t column, float step) {
  const int bits = bits_of(code), number = code == Code::kOneBit ? step > 0 : static_cast<int>(step);
  if (code == Code::kInt8) {
    row[column] = static_cast<uint8_t>(number);
    return;
  }
  const int shift = static_cast<int>(column * bits % 8), mask = ((1 << bits) - 1) << shift;
  const int shifted = (code == Code::kInt4 ? number + 8 : number) << shift;
  uint8_t& byte = row[column * bits / 8];
  byte = static_cast<uint8_t>((byte & ~mask) | shifted);
}
float step_at(Code code, const uint8_t* row, int64_t column) {
  if (code == Code::kInt8) return static_cast<float>(static_cast<int8_t>(row[column]));
  if (code == Code::kInt4) return static_cast<float>((row[column / 2] >> (column % 2 * 4) & 15) - 8);
  return (row[column / 8] >> (column % 8) & 1) != 0 ? 1.0f : -1.0f;
}

void run_encode(const Encode& problem, int, Context&) {
  const int64_t count = problem.x.sizes[0], columns = columns_of(problem.scales, problem.code);
  const int block = block_elements(problem.code);
  auto* errors = problem.error.as<float>();
  for (int64_t row = 0; row < problem.codes.sizes[0]; ++row) {
    uint8_t* const codes = problem.codes.as<uint8_t>() + row * problem.codes.strides[0];
    float* const scales = problem.scales.as<float>() + row * problem.scales.strides[0];
    for (int64_t first = 0; first < columns; first += block) {
      std::vector<float> values(block);
      const int64_t begin = row * columns + first;
      for (int64_t i = 0; i < block && begin + i < count; ++i) {
        values[i] = static_cast<float>(load_element(problem.x.data, problem.x.dtype, begin + i));
        if (errors != nullptr && problem.carries) values[i] += errors[begin + i];
      }
      const float scale = scales[first / block] = scale_of(problem.code, values);
      for (int64_t i = 0; i < block; ++i) {
        const float step = std::isnan(scale) ? 1.0f : step_of(problem.code, values[i], scale);
        put(problem.code, codes, first + i, step);
        if (errors == nullptr || begin + i >= count) continue;
        float& error = errors[begin + i];
        const float left = std::fma(-step, scale, values[i]);
        error = problem.carries ? left : std::fma(left, static_cast<float>(problem.gain), error);
        if (!std::isfinite(error)) error = 0;
      }
    }
  }
}

void run_decode(const Decode& problem, int, Context&) {
  const int64_t count = problem.output.sizes[0], rows = problem.codes.sizes[0];
  const int64_t columns = columns_of(problem.scales, problem.code);
  const auto step = [&](int64_t row, int64_t column) {
    return step_at(problem.code, problem.codes.as<const uint8_t>() + row * problem.codes.strides[0], column);
  };
  const auto scale = [&](int64_t row, int64_t column) {
    return problem.scales.as<const float>()[row * problem.scales.strides[0] + column / block_elements(problem.code)];
  };
  for (int64_t i = 0; i < count; ++i) {
    float value = 0;
    if (problem.mean) {
      for (int64_t row = 0; row < rows; ++row) value = std::fma(step(row, i), scale(row, i), value);
      value /= static_cast<float>(rows);
    } else {
      value = step(i / columns, i % columns) * scale(i / columns, i % columns);
    }
    if (problem.adds) value += static_cast<float>(load_element(problem.output.data, problem.output.dtype, i));
    store_element(problem.output.data, problem.output.dtype, i, value);
  }
}

uint64_t code_version() {
  return hash_text("gradient_code reference 1");
}

}  // namespace

constinit const registry::Kernel<Encode> kEncodeReference{
    .name = "reference", .supports = supports_on_cpu<Encode>, .run = run_encode, .source_hash = code_version};
constinit const registry::Kernel<Decode> kDecodeReference{
    .name = "reference", .supports = supports_on_cpu<Decode>, .run = run_decode, .source_hash = code_version};

}  // namespace kernel_pytorch::gradient_code
