// Rounds operands on the host.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/attention/fp8/rounding.h"

namespace kernel_pytorch::attention::fp8 {
namespace {

void rotate(float* row, int columns) {
  for (int i = 0; i < columns; ++i) row[i] = is_negated(i) ? -row[i] : row[i];
  for (int distance = 1; distance < columns; distance *= 2) {
    for (int i = 0; i < columns; ++i) {
      if ((i & distance) != 0) continue;
      const float low = row[i], high = row[i + distance];
      row[i] = low + high;
      row[i + distance] = low - high;
    }
  }
  const float factor = std::bit_cast<float>(power_of_two_bits(-halved_exponent(columns)));
  for (int i = 0; i < columns; ++i) row[i] *= factor;
}

// Rows [first, last) of a head.
void round_block(const TensorView& source, const TensorView& target, int64_t batch, int64_t head, int64_t first,
                 int64_t last, bool rotates) {
  const int64_t columns = source.sizes[3], wide = target.sizes[3];
  std::vector<float> block(static_cast<size_t>((last - first) * wide), 0.0f);
  uint32_t largest = 0;
  for (int64_t row = first; row < last; ++row) {
    float* const values = block.data() + (row - first) * wide;
    const int64_t at = batch * source.strides[0] + head * source.strides[1] + row * source.strides[2];
    for (int64_t i = 0; i < columns; ++i) {
      values[i] = static_cast<float>(load_element(source.data, source.dtype, at + i * source.strides[3]));
    }
    if (rotates) rotate(values, static_cast<int>(wide));
    for (int64_t i = 0; i < wide; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  }
  const int exponent = scale_exponent(largest);
  const float scale = std::bit_cast<float>(power_of_two_bits(exponent));
  const float factor = std::bit_cast<float>(power_of_two_bits(-exponent));
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = batch * target.strides[0] + head * target.strides[1] + row * target.strides[2];
    for (int64_t i = 0; i < wide; ++i) {
      float value =
          to_float(from_float<Float8E4M3>(block[static_cast<size_t>((row - first) * wide + i)] * factor)) * scale;
      // fp16's largest values round up beyond its range.
      if (target.dtype == DType::kFloat16 && std::fabs(value) > 65504.0f) value = std::copysign(65504.0f, value);
      store_element(target.data, target.dtype, at + i, value);
    }
  }
}

TensorView round(const TensorView& source, int64_t columns, bool rotates, Context& context) {
  TensorView target = contiguous_view(nullptr, source.dtype,
                                      {source.sizes[0], source.sizes[1], source.sizes[2], columns}, source.device);
  target.data = context.scratch->allocate(static_cast<size_t>(target.byte_count()));
  const int64_t heads = source.sizes[1], rows = source.sizes[2], blocks = (rows + kBlockRows - 1) / kBlockRows;
  parallel_for(context.threads, source.sizes[0] * heads * blocks, [&](int64_t task) {
    const int64_t head = task / blocks, first = task % blocks * kBlockRows;
    round_block(source, target, head / heads, head % heads, first, std::min(first + kBlockRows, rows), rotates);
  });
  return target;
}

}  // namespace

RoundedOperands round_on_host(const Forward& problem, Context& context) {
  const int64_t size = size_of_rounded(problem);
  return {.query = round(problem.query, size, problem.rotate, context),
          .key = round(problem.key, size, problem.rotate, context),
          .value = round(problem.value, problem.value.sizes[3], false, context)};
}

}  // namespace kernel_pytorch::attention::fp8
