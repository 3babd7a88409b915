// The references: one element after another. Codes are found by their distances to all values of the format, in double,
// not by the kernels' comparisons; scales and stochastic rounding are the contract's arithmetic, which is fp32's.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/group_quantize/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::group_quantize {
namespace {

constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The values of a format's codes, without scales; integers count from 0. NaN where a code is none.
std::vector<double> values_of(Format format) {
  std::vector<double> values;
  for (int code = 0; code <= group_format::last_code(format); ++code) {
    if (group_format::is_e2m1(format)) {
      values.push_back((code & 8) != 0 ? -kE2M1[code & 7] : kE2M1[code & 7]);
    } else if (format == Format::kMxfp8) {
      values.push_back(to_float(Float8E4M3{static_cast<uint8_t>(code)}));
    } else {
      values.push_back(code);
    }
  }
  return values;
}

struct Scale {
  float stored = 0;
  double value = 0;
  int zero = 0;
};

float rounded_to(float value, DType dtype) {
  float stored[1];
  store_element(stored, dtype, 0, value);
  return static_cast<float>(load_element(stored, dtype, 0));
}

// The nearest integer, ties to even; a quotient of doubles of floats is a tie only where it is one.
double nearest(double value) {
  return std::nearbyint(value);
}

Scale scale_of(const Quantize& problem, const std::vector<float>& group, float tensor_scale) {
  float amax = 0, low = 0, high = 0;
  for (const float value : group) {
    const int zero = problem.zeros.is_present() ? 0 : group_format::middle_code(problem.format);
    if (!std::isfinite(value)) return {.stored = kNaN, .value = kNaN, .zero = zero};
    amax = std::max(amax, std::fabs(value));
    low = std::min(low, value);
    high = std::max(high, value);
  }
  if (problem.format == Format::kNvfp4) {
    const float stored = rounded_to(std::min(amax / (6 * tensor_scale), 448.0f), DType::kFloat8E4M3);
    return {.stored = stored, .value = stored * tensor_scale};
  }
  if (group_format::has_power_scale(problem.format)) {
    const int largest = problem.format == Format::kMxfp4 ? 2 : 8;
    const int exponent = amax == 0 ? -127 : std::max(std::ilogb(amax) - largest, -127);
    const auto stored = static_cast<float>(std::ldexp(1.0, exponent));
    return {.stored = stored, .value = stored};
  }
  const bool has_zeros = problem.zeros.is_present();
  const int last = group_format::last_code(problem.format), middle = group_format::middle_code(problem.format);
  const auto steps = static_cast<float>(has_zeros ? last : middle - 1);
  const float exact = has_zeros ? high / steps - low / steps : amax / steps;
  const float stored = exact < group_format::kLeastIntegerScale ? 0 : rounded_to(exact, problem.scales.dtype);
  Scale scale{.stored = stored, .value = stored, .zero = middle};
  if (has_zeros) {
    scale.zero = stored > 0 ? static_cast<int>(std::min<double>(nearest(-double{low} / stored), last)) : 0;
  }
  return scale;
}

// The code of the nearest value; of two the even one.
int nearest_code(Format format, const std::vector<double>& values, double value, const Scale& scale) {
  const bool is_integer = group_format::is_integer(format);
  const int zero_code = is_integer ? scale.zero : std::signbit(value) ? (group_format::last_code(format) + 1) / 2 : 0;
  if (!(scale.value > 0)) return zero_code;
  if (is_integer) {
    return static_cast<int>(
        std::clamp<double>(nearest(value / scale.value) + scale.zero, 0, group_format::last_code(format)));
  }
  const double largest = (format == Format::kMxfp8 ? 448 : 6) * scale.value;  // beyond it all distances may look alike
  value = std::clamp(value, -largest, largest);
  int best = zero_code;
  for (size_t code = 0; code < values.size(); ++code) {
    if (std::isnan(values[code]) || std::signbit(values[code]) != std::signbit(value)) continue;
    const double distance = std::fabs(values[code] * scale.value - value);
    const double least = std::fabs(values[best] * scale.value - value);
    if (distance < least || (distance == least && code % 2 == 0)) best = static_cast<int>(code);
  }
  return best;
}

// Of the two values next to `value` the upper one (in magnitude, of formats with signs) where the random fraction is
// below the distance from the lower one.
int stochastic_code(Format format, const std::vector<double>& values, float value, const Scale& scale,
                    uint32_t random) {
  const bool is_integer = group_format::is_integer(format);
  const int half = (group_format::last_code(format) + 1) / 2;
  const int sign = !is_integer && std::signbit(value) ? half : 0;
  if (!(scale.value > 0)) return is_integer ? scale.zero : sign;
  const auto fraction = static_cast<float>(random) * 0x1p-16f;
  const auto single = static_cast<float>(scale.value);
  if (is_integer) {
    const double low = std::floor(double{value} / scale.value);
    const float share = std::fma(static_cast<float>(-low), single, value);
    const double code = low + (share > fraction * single ? 1 : 0) + scale.zero;
    return static_cast<int>(std::clamp<double>(code, 0, group_format::last_code(format)));
  }
  const double magnitude = std::fabs(value);
  int low = 0;
  const int last = format == Format::kMxfp8 ? 0x7e : 7;
  while (low < last && values[low + 1] * scale.value <= magnitude) ++low;
  if (low == last) return sign | low;
  const auto share = static_cast<float>(magnitude - values[low] * scale.value);
  const auto step = static_cast<float>((values[low + 1] - values[low]) * scale.value);
  return sign | (low + (share > fraction * step ? 1 : 0));
}

// Bit by bit, as the contract has them.
void put_code(const TensorView& codes, Format format, int64_t row, int64_t column, int code) {
  uint8_t* bytes = codes.as<uint8_t>() + row * codes.sizes[1];
  const int bits = group_format::code_bits(format);
  for (int i = 0; i < bits; ++i) {
    const int64_t place = column * bits + i;
    if (place % 8 == 0) bytes[place / 8] = 0;  // bits of columns that are not there are 0
    bytes[place / 8] = static_cast<uint8_t>(bytes[place / 8] | (code >> i & 1) << place % 8);
  }
}
int code_at(const TensorView& codes, Format format, int64_t row, int64_t column) {
  const uint8_t* bytes = codes.as<const uint8_t>() + row * codes.sizes[1];
  const int bits = group_format::code_bits(format);
  int code = 0;
  for (int i = 0; i < bits; ++i) {
    const int64_t place = column * bits + i;
    code |= (bytes[place / 8] >> place % 8 & 1) << i;
  }
  return code;
}

void put_scale(const Quantize& problem, int64_t place, float stored) {
  if (!group_format::has_power_scale(problem.format)) {
    return store_element(problem.scales.data, problem.scales.dtype, place, stored);
  }
  problem.scales.as<uint8_t>()[place] = static_cast<uint8_t>(std::isnan(stored) ? 0xff : std::ilogb(stored) + 127);
}

float tensor_scale_of(const TensorView& tensor_scale) {
  return tensor_scale.is_present() ? *tensor_scale.as<const float>() : 1;
}

void run_quantize(const Quantize& problem, int, Context& context) {
  const int64_t rows = problem.x.sizes[0], columns = problem.x.sizes[1];
  const std::vector<double> values = values_of(problem.format);
  const float tensor_scale = tensor_scale_of(problem.tensor_scale);
  const int64_t* seed = problem.seed.is_present() ? problem.seed.as<const int64_t>() : nullptr;
  parallel_for(context.threads, rows, [&](int64_t row) {
    for (int64_t first = 0; first < columns; first += problem.group) {
      const int64_t end = std::min(columns, first + problem.group);
      std::vector<float> group;
      for (int64_t column = first; column < end; ++column) {
        const int64_t place = row * problem.x.strides[0] + column * problem.x.strides[1];
        group.push_back(static_cast<float>(load_element(problem.x.data, problem.x.dtype, place)));
      }
      const Scale scale = scale_of(problem, group, tensor_scale);
      const int64_t place = row * problem.scales.sizes[1] + first / problem.group;
      put_scale(problem, place, scale.stored);
      if (problem.zeros.is_present()) problem.zeros.as<uint8_t>()[place] = static_cast<uint8_t>(scale.zero);
      for (int64_t column = first; column < end; ++column) {
        const float value = group[column - first];
        int code;
        if (seed == nullptr) {
          code = nearest_code(problem.format, values, value, scale);
        } else {
          const int64_t element = row * columns + column;
          const PhiloxBlock block = philox(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]),
                                           static_cast<uint64_t>(element / kPhiloxElements));
          code = stochastic_code(problem.format, values, value, scale,
                                 block.bits(static_cast<int>(element % kPhiloxElements)));
        }
        put_code(problem.codes, problem.format, row, column, code);
      }
    }
  });
}

void run_dequantize(const Dequantize& problem, int, Context& context) {
  const int64_t rows = problem.output.sizes[0], columns = problem.output.sizes[1];
  const std::vector<double> values = values_of(problem.format);
  const float tensor_scale = tensor_scale_of(problem.tensor_scale);
  parallel_for(context.threads, rows, [&](int64_t row) {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t place = row * problem.scales.sizes[1] + column / problem.group;
      double scale;
      if (group_format::has_power_scale(problem.format)) {
        const int byte = problem.scales.as<const uint8_t>()[place];
        scale = byte == 0xff ? kNaN : std::ldexp(1.0, byte - 127);
      } else {
        scale = load_element(problem.scales.data, problem.scales.dtype, place);
      }
      double value = values[code_at(problem.codes, problem.format, row, column)];
      if (group_format::is_integer(problem.format)) {
        value -= problem.zeros.is_present() ? problem.zeros.as<const uint8_t>()[place]
                                            : group_format::middle_code(problem.format);
      }
      const float scaled = static_cast<float>(value * scale) * tensor_scale;
      store_element(problem.output.data, problem.output.dtype, row * problem.output.strides[0] + column, scaled);
    }
  });
}

uint64_t code_version() {
  return hash_text("group_quantize reference 2");
}

}  // namespace

constinit const registry::Kernel<Quantize> kQuantizeReference{
    .name = "reference", .supports = supports_on_cpu<Quantize>, .run = run_quantize, .source_hash = code_version};
constinit const registry::Kernel<Dequantize> kDequantizeReference{
    .name = "reference", .supports = supports_on_cpu<Dequantize>, .run = run_dequantize, .source_hash = code_version};

}  // namespace kernel_pytorch::group_quantize
