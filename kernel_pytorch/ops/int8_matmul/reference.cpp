// The reference of the product of 8-bit integers: exact sums of each group, scaled in double. Rows are rounded as the
// contract has it, in fp32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/int8_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::int8_matmul {
namespace {

struct Row {
  std::vector<int> codes;
  float scale = 0;
};

Row row_of(const Product& problem, int64_t row) {
  const int64_t k = problem.x.sizes[1];
  Row made{.codes = std::vector<int>(static_cast<size_t>(k))};
  std::vector<float> values(static_cast<size_t>(k));
  float amax = 0;
  bool is_finite = true;
  for (int64_t i = 0; i < k; ++i) {
    values[i] = static_cast<float>(load_element(problem.x.data, problem.x.dtype, row * problem.x.strides[0] + i));
    is_finite &= std::isfinite(values[i]);
    amax = std::max(amax, std::fabs(values[i]));
  }
  if (has_codes(problem)) {
    std::ranges::copy(values, made.codes.begin());
    made.scale = problem.scale_x.as<const float>()[row];
    return made;
  }
  if (!is_finite) {
    made.scale = std::nanf("");
    return made;
  }
  made.scale = amax / 127.0f < kLeastScale ? 0.0f : amax / 127.0f;
  for (int64_t i = 0; i < k && made.scale > 0; ++i) {
    made.codes[i] = static_cast<int>(std::nearbyint(values[i] / made.scale));
  }
  return made;
}

void run(const Product& problem, int, Context& context) {
  const int64_t k = problem.x.sizes[1], n = problem.weight.sizes[0], groups = problem.scale_weight.sizes[1];
  parallel_for(context.threads, problem.x.sizes[0], [&](int64_t i) {
    const Row row = row_of(problem, i);
    for (int64_t j = 0; j < n; ++j) {
      const auto* weight = problem.weight.as<const int8_t>() + j * k;
      double total = 0;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t begin = group * problem.group, end = problem.group == 0 ? k : std::min(k, begin + problem.group);
        int64_t sum = 0;
        for (int64_t p = begin; p < end; ++p) sum += int64_t{row.codes[p]} * weight[p];
        total += static_cast<double>(sum) * problem.scale_weight.as<const float>()[j * groups + group];
      }
      total *= row.scale;
      if (problem.bias.is_present()) total += load_element(problem.bias.data, problem.bias.dtype, j);
      store_element(problem.output.data, problem.output.dtype, i * problem.output.strides[0] + j,
                    pointwise::evaluate(problem.activation, total).value);
    }
  });
}

uint64_t code_version() {
  return hash_text("int8_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::int8_matmul
