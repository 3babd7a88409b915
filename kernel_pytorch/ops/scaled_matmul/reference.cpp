// The reference of the scaled product: one element after another, in double.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

std::vector<double> decoded(const TensorView& codes) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(codes.element_count()));
  for (int64_t row = 0; row < codes.sizes[0]; ++row) {
    for (int64_t i = 0; i < codes.sizes[1]; ++i) {
      values.push_back(load_element(codes.data, codes.dtype, row * codes.strides[0] + i));
    }
  }
  return values;
}

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0], k = problem.a.sizes[1];
  const std::vector<double> a = decoded(problem.a), b = decoded(problem.b);
  const ScaleLayout scale_a(problem.scale_a, m), scale_b(problem.scale_b, n);
  const double output_scale = problem.output_scale.is_present() ? *problem.output_scale.as<const float>() : 1;
  std::vector<double> largest(static_cast<size_t>(m), 0);
  parallel_for(context.threads, m, [&](int64_t i) {
    for (int64_t j = 0; j < n; ++j) {
      double total = 0;
      for (int64_t block = 0; block * kBlock < k; ++block) {
        double sum = 0;
        for (int64_t p = block * kBlock; p < std::min(k, (block + 1) * kBlock); ++p) sum += a[i * k + p] * b[j * k + p];
        total += sum * scale_a.data[scale_a.offset(i, block)] * scale_b.data[scale_b.offset(j, block)];
      }
      if (problem.bias.is_present()) total += load_element(problem.bias.data, problem.bias.dtype, j);
      largest[i] = std::fmax(largest[i], std::fabs(total));  // fmax passes NaN over
      store_element(problem.output.data, problem.output.dtype, i * problem.output.strides[0] + j, total * output_scale);
    }
  });
  if (!problem.amax.is_present()) return;
  auto& amax = *problem.amax.as<float>();
  for (double value : largest) amax = std::fmax(amax, static_cast<float>(value));
}

uint64_t code_version() {
  return hash_text("scaled_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::scaled_matmul
