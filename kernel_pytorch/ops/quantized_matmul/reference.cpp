// The reference: the weight rounded to x's type, sums in double.
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

double scale_at(const TensorView& scales, int64_t place) {
  if (scales.dtype != DType::kInt8) return load_element(scales.data, scales.dtype, place);
  const int byte = scales.as<const uint8_t>()[place];
  return byte == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, byte - 127);
}

double weight_at(const Product& problem, int64_t row, int64_t column) {
  const uint8_t* bytes = problem.codes.as<const uint8_t>() + row * problem.codes.sizes[1];
  int code = 0;
  for (int i = 0, bits = group_format::code_bits(problem.format); i < bits; ++i) {
    const int64_t bit = column * bits + i;
    code |= (bytes[bit / 8] >> bit % 8 & 1) << i;
  }
  const int64_t place = row * problem.scales.sizes[1] + column / problem.group;
  double value;
  if (group_format::is_integer(problem.format)) {
    value = code - (problem.zeros.is_present() ? problem.zeros.as<const uint8_t>()[place]
                                               : group_format::middle_code(problem.format));
  } else if (group_format::is_e2m1(problem.format)) {
    constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    value = (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
  } else {
    value = to_float(Float8E4M3{static_cast<uint8_t>(code)});
  }
  double rounded[1];
  store_element(rounded, problem.x.dtype, 0, value * scale_at(problem.scales, place));
  return load_element(rounded, problem.x.dtype, 0);
}

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.codes.sizes[0];
  const double tensor_scale = problem.tensor_scale.is_present() ? *problem.tensor_scale.as<const float>() : 1;
  parallel_for(context.threads, n, [&](int64_t j) {
    std::vector<double> weight(static_cast<size_t>(k));
    for (int64_t p = 0; p < k; ++p) weight[p] = weight_at(problem, j, p);
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p) {
        sum += load_element(problem.x.data, problem.x.dtype, i * problem.x.strides[0] + p) * weight[p];
      }
      sum *= tensor_scale;
      if (problem.bias.is_present()) sum += load_element(problem.bias.data, problem.bias.dtype, j);
      store_element(problem.output.data, problem.output.dtype, i * problem.output.strides[0] + j,
                    pointwise::evaluate(problem.activation, sum).value);
    }
  });
}

uint64_t code_version() {
  return hash_text("quantized_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantized_matmul
