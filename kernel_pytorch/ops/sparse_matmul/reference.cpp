// The reference: sums of the kept products in double.
#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

using sparse_compress::kBlockColumns;
using sparse_compress::kWordColumns;

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.values.sizes[0];
  const auto* metadata = problem.metadata.as<const uint32_t>();
  parallel_for(context.threads, n, [&](int64_t j) {
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t kept = 0; kept < k / 2; ++kept) {
        const int64_t first = kept / 2 * 4;  // of its group
        const uint32_t word = metadata[(first / kBlockColumns * n + j) * 2 + first % kBlockColumns / kWordColumns];
        const int64_t column = first + (word >> (first % kWordColumns + kept % 2 * 2) & 3);
        sum += load_element(problem.values.data, problem.values.dtype, j * k / 2 + kept) *
               load_element(problem.x.data, problem.x.dtype, i * problem.x.strides[0] + column);
      }
      if (problem.bias.is_present()) sum += load_element(problem.bias.data, problem.bias.dtype, j);
      store_element(problem.output.data, problem.output.dtype, i * problem.output.strides[0] + j,
                    pointwise::evaluate(problem.activation, sum).value);
    }
  });
}

uint64_t code_version() {
  return hash_text("sparse_matmul reference 1");
}

}  // namespace

constinit const registry::Kernel<Product> kReference{
    .name = "reference", .supports = supports_on_cpu<Product>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::sparse_matmul
